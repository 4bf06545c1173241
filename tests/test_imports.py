"""Heavy imports run without garbage collection, which is enabled again afterwards."""

import ast
import gc
import weakref
from collections.abc import Iterator

import pytest
from conftest import ROOT

from lm.cli.imports import freeze, heavy_imports


class Loop:
    """Refers to itself, so only garbage collection frees it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    freeze.cache_clear()
    yield
    gc.unfreeze()
    freeze.cache_clear()


def test_imported_objects_are_frozen_and_later_ones_collected() -> None:
    gc.collect()
    with heavy_imports():
        assert not gc.isenabled()
        imported = weakref.ref(Loop())
    assert gc.isenabled()
    later = weakref.ref(Loop())
    gc.collect()
    assert imported() is not None
    assert later() is None


def test_garbage_between_two_imports_is_collected() -> None:
    with heavy_imports():
        pass
    job = weakref.ref(Loop())
    with heavy_imports():
        pass
    gc.collect()
    assert job() is None


def test_a_failing_import_leaves_garbage_collection_enabled() -> None:
    with pytest.raises(ImportError), heavy_imports():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "scripts").glob("*.py")))
def test_every_command_imports_heavy_modules_in_one_block(name: str) -> None:
    source = (ROOT / "lm/cli" / f"{name}.py").read_text()
    task = next(node for node in ast.parse(source).body if getattr(node, "name", "") == "task")
    blocks = [node for node in task.body if isinstance(node, ast.With)]
    assert [ast.unparse(block.items[0].context_expr) for block in blocks] == ["heavy_imports()"]
    late = {node for node in ast.walk(task) if isinstance(node, ast.ImportFrom)}
    assert late == set(blocks[0].body)
