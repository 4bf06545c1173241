"""A source becomes one text, which is split by rules that do not depend on seed, machine or later documents."""

import hashlib
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data import text as module
from lm.data.text import overlap, read, split
from tests.helpers.texts import Listed, stored, texts

PAIRS = st.lists(st.tuples(st.text(max_size=5), st.text(min_size=1, max_size=5)), min_size=1, max_size=4)
NAMES = st.lists(st.text(), min_size=2, max_size=40, unique=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("text")


# --- reading


@given(pairs=PAIRS, limit=st.integers(1, 30), block=st.integers(1, 5))
@settings(deadline=None, max_examples=50)
def test_text_beyond_the_limit_is_neither_read_nor_kept(
    pairs: list[tuple[str, str]], limit: int, block: int, folder: Path
) -> None:
    source, whole = Listed(pairs, block), "".join(text for _, text in pairs).encode()
    if limit < len(pairs[0][1][0].encode()):
        return  # not one character fits
    text = read(source, folder / "text", max_bytes=limit)
    content = (folder / "text").read_bytes()
    assert whole.startswith(content)
    assert content == whole or limit - 4 < len(content) <= limit
    assert content.decode() == "".join(texts(text.whole()))
    assert sum(source.read[:-1]) < limit


def test_the_hash_is_of_sizes_names_and_texts_in_order(folder: Path) -> None:
    digest = hashlib.sha256()
    for part in ("é.txt", "text é", "b", "c\n"):
        digest.update(len(part.encode()).to_bytes(8, "big") + part.encode())
    assert stored(folder, [("é.txt", "text é"), ("empty", ""), ("b", "c\n")]).hash == digest.hexdigest()


# --- the split


@given(text=st.text(min_size=2), fraction=st.floats(0.01, 0.99), block=st.integers(2, 9))
@settings(deadline=None, max_examples=50)
def test_a_single_text_is_split_by_characters(text: str, fraction: float, block: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        train, val, _ = split(stored(folder, [("name", text)]), fraction, None)
        assert "".join(texts(train) + texts(val)) == text
        assert len("".join(texts(train))) == int(len(text) * (1 - fraction))


@given(names=NAMES, fraction=st.floats(0.01, 0.99))
@settings(deadline=None, max_examples=50)
def test_several_documents_are_split_whole_and_no_side_is_empty(
    names: list[str], fraction: float, folder: Path
) -> None:
    train, val, _ = split(stored(folder, [(name, f"text {name}") for name in names]), fraction, None)
    trained, held_out = ([text[5:] for text in texts(part)] for part in (train, val))
    assert trained
    assert held_out
    assert sorted(trained + held_out) == sorted(names)
    assert trained == [name for name in names if name in trained]  # in the order given


def test_documents_added_later_move_no_others(folder: Path) -> None:
    def sides(pairs: list[tuple[str, str]]) -> tuple[set[str], set[str]]:
        train, val, _ = split(stored(folder, pairs), 0.1, None)
        return set(texts(train)), set(texts(val))

    everything = [(f"file{i}.py", f"text {i}") for i in range(2000)]
    train, val = sides(everything)
    assert 150 < len(val) < 250
    for part in (everything[:500], everything[::3], everything[::-1]):
        some_train, some_val = sides(part)
        assert some_train <= train
        assert some_val <= val


@given(text=st.text(min_size=2), limit=st.integers(4, 30), fraction=st.sampled_from([0.1, 0.5, 0.95]))
@settings(deadline=None, max_examples=50)
def test_the_end_of_a_single_text_is_held_out_up_to_the_limit(
    text: str, limit: int, fraction: float, folder: Path
) -> None:
    whole = stored(folder, [("name", text)])
    plain, limited = split(whole, fraction, None), split(whole, fraction, limit)
    held_out = "".join(texts(limited[1]))
    assert "".join(texts(limited[0])) + held_out == text
    assert (limited[2] == plain[2]) == (plain[1].n_bytes <= limit)
    if plain[1].n_bytes <= limit:
        assert texts(limited[1]) == texts(plain[1])
    else:
        assert limit - 4 < len(held_out.encode()) <= limit


@given(names=NAMES, limit=st.integers(4, 200))
@settings(deadline=None, max_examples=50)
def test_the_documents_of_lowest_hash_that_fit_are_held_out(names: list[str], limit: int, folder: Path) -> None:
    pairs = [(name, "x" * (i % 7 + 1) + name) for i, name in enumerate(names)]
    whole = stored(folder, pairs)
    plain, limited = split(whole, 0.5, None), split(whole, 0.5, limit)
    if plain[1].n_bytes <= limit:
        assert (texts(limited[1]), limited[2]) == (texts(plain[1]), plain[2])
        return
    ranked = sorted(pairs, key=lambda pair: hashlib.sha256(pair[0].encode()).digest()[:8])
    total = list(itertools.accumulate(len(text.encode()) for _, text in ranked))
    if n_fitting := sum(size <= limit for size in total):
        assert sorted(texts(limited[1])) == sorted(text for _, text in ranked[:n_fitting])
        assert sorted(texts(limited[0])) == sorted(text for _, text in ranked[n_fitting:])
        assert limited[2] != plain[2]
        return
    whole_text, (held_out,) = ranked[0][1], texts(limited[1])  # the end of the document of lowest hash
    assert whole_text.endswith(held_out)
    assert limit - 4 < len(held_out.encode()) <= limit
    assert texts(limited[0]) == [text if name != ranked[0][0] else text[: -len(held_out)] for name, text in pairs]
    assert limited[2] != plain[2]
    assert overlap(*limited[:2])["n_documents"] == sum(text == whole_text for _, text in ranked[1:])


def test_texts_on_both_sides_are_counted(folder: Path) -> None:
    pairs = [(f"{i}", f"text {i % 150}") for i in range(200)]  # 50 texts stand twice
    train, val, _ = split(stored(folder, pairs), 0.3, None)
    both = [text for text in texts(val) if text in set(texts(train))]
    shared = overlap(train, val)
    assert (shared["n_documents"], shared["of"]) == (len(both), len(texts(val)))
    assert shared["share"] == pytest.approx(len("".join(both)) / val.n_bytes)
    assert 0 < len(both) < len(texts(val))
    single = split(stored(folder, [("name", "some text")]), 0.5, None)
    assert overlap(*single[:2])["share"] == 0
