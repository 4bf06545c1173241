"""Imports without a search for garbage, and with one afterwards."""

import ast
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

from lm.cli.imports import freeze, heavy_imports


class Loop:
    """Refers to itself, so it goes only when it is searched for."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    freeze.cache_clear()
    yield
    gc.unfreeze()
    freeze.cache_clear()


def test_what_is_imported_is_never_searched_and_what_comes_later_is() -> None:
    gc.collect()
    with heavy_imports():
        assert not gc.isenabled()
        imported = weakref.ref(Loop())
    assert gc.isenabled()
    later = weakref.ref(Loop())
    gc.collect()
    assert imported() is not None
    assert later() is None


def test_the_garbage_of_a_sweeps_first_job_goes_though_the_second_imports_again() -> None:
    with heavy_imports():
        pass
    job = weakref.ref(Loop())
    with heavy_imports():
        pass
    gc.collect()
    assert job() is None


def test_an_import_that_fails_leaves_the_search_on() -> None:
    with pytest.raises(ImportError), heavy_imports():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.stem)
def test_scripts_import_what_is_heavy_so(script: Path) -> None:
    main = next(node for node in ast.parse(script.read_text()).body if getattr(node, "name", "") == "main")
    blocks = [node for node in main.body if isinstance(node, ast.With)]
    assert [ast.unparse(block.items[0].context_expr) for block in blocks] == ["heavy_imports()"]
    late = {node for node in ast.walk(main) if isinstance(node, ast.ImportFrom)}
    assert late == set(blocks[0].body)
