"""A source becomes one text, which is split by rules, then token files that are complete, current and lossless."""

import hashlib
import io
import itertools
import json
import os
import re
import shutil
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest
import tokenizers
from conftest import as_nobody, small_disk
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from lm.config import DataConfig, TokenizerConfig
from lm.data import sources
from lm.data import text as module
from lm.data.batches import TrainingStream
from lm.data.text import chunks, decoded, overlap, read, split, stretches
from lm.data.tokenizer import byte_tokenizer, char_tokenizer, encode, load_tokenizer, train_bpe
from lm.data.tokens import encode_whole, prepare
from lm.errors import UserError
from tests.helpers.runs import PROCESSES
from tests.helpers.texts import Listed, documents, stored, texts

BYTE, BPE = TokenizerConfig(kind="byte", vocab_size=None), TokenizerConfig(vocab_size=300)
CHAR = TokenizerConfig(kind="char", vocab_size=None)
BREAKS = "".join(f"ab {i}\n\n  c\t\r\n d\x1c\n\x85\nf(x);\n" for i in range(30))
WORDS = ["a", "b;", "()", "é", "1", "s", "'", "_", "你", "。"]  # between which ByteLevel ends a word, or not
SPACES = ["\n", "\n\n", " ", "    ", " \n", "\t", "\r\n", "\x0b", "\x1c", "\x85", "\xa0", "\u2028", "\u3000"]
PAIRS_OF_WORDS = [f"{word}{other}a1" * 20 for word in WORDS for other in WORDS]
TRAINED = train_bpe([BREAKS, *(f"a{space}{other}b" * 20 for space in SPACES for other in SPACES), *PAIRS_OF_WORDS], 400)


PAIRS = st.lists(st.tuples(st.text(max_size=5), st.text(min_size=1, max_size=5)), min_size=1, max_size=4)
NAMES = st.lists(st.text(), min_size=2, max_size=40, unique=True)


@pytest.fixture
def source(corpus: Path, tmp_path: Path) -> DataConfig:
    return DataConfig(source="text", path=str(corpus), seq_len=8, cache_dir=str(tmp_path / "cache"))


def folders(source: DataConfig) -> list[Path]:
    return sorted(Path(source.cache_dir, "tokens").glob("*"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("text")


@given(pairs=PAIRS, limit=st.integers(1, 30), block=st.integers(1, 5))
@settings(deadline=None, max_examples=30)
def test_text_beyond_the_limit_is_not_read(pairs: list[tuple[str, str]], limit: int, block: int, folder: Path) -> None:
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


@given(text=st.text(min_size=2), fraction=st.floats(0.01, 0.99), limit=st.integers(4, 30), block=st.integers(2, 9))
@settings(deadline=None, max_examples=50)
def test_the_end_of_a_single_text_is_held_out_by_characters_up_to_the_limit(
    text: str, fraction: float, limit: int, block: int, folder: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        whole = stored(folder, [("name", text)])
        plain, limited = split(whole, fraction, None), split(whole, fraction, limit)
        train, val = ("".join(texts(part)) for part in plain[:2])
        assert (train + val, len(train)) == (text, min(int(len(text) * (1 - fraction)), len(text) - 1))
        train, val = ("".join(texts(part)) for part in limited[:2])
        assert train + val == text
        assert (limited[2] == plain[2]) == (plain[1].n_bytes <= limit)
        assert limited[1].n_bytes == plain[1].n_bytes or limit - 4 < limited[1].n_bytes <= limit


def test_documents_added_later_move_no_others(folder: Path) -> None:
    def sides(pairs: list[tuple[str, str]]) -> tuple[set[str], set[str]]:
        train, val, *_ = split(stored(folder, pairs), 0.1, None)
        return set(texts(train)), set(texts(val))

    everything = [(f"file{i}.py", f"text {i}") for i in range(2000)]
    train, val = sides(everything)
    assert 150 < len(val) < 250
    for part in (everything[:500], everything[::3], everything[::-1]):
        some_train, some_val = sides(part)
        assert some_train <= train
        assert some_val <= val


@given(names=NAMES, limit=st.integers(4, 200))
@settings(deadline=None, max_examples=30)
def test_the_documents_of_lowest_hash_are_held_out_up_to_the_limit(names: list[str], limit: int, folder: Path) -> None:
    pairs = [(name, f"{'x' * (i % 7)} {name}") for i, name in enumerate(names)]  # all different
    whole = stored(folder, pairs)
    plain, limited = split(whole, 0.5, None), split(whole, 0.5, limit)
    assume(not plain[3])  # else a document is cut, as the next test says
    assume(limit > plain[1].n_bytes or not limited[3])
    ranked = [text for _, text in sorted(pairs, key=lambda pair: hashlib.sha256(pair[0].encode()).digest()[:8])]
    sizes = list(itertools.accumulate(len(text.encode()) for text in ranked))
    sides = [texts(part) for part in plain[:2]]
    assert all(sides)
    assert sorted(itertools.chain(*sides)) == sorted(ranked)
    assert sides[0] == [text for _, text in pairs if text in sides[0]], "in the order given"
    assert (limited[2] == plain[2]) == (plain[1].n_bytes <= limit)
    if plain[1].n_bytes <= limit:
        assert texts(limited[1]) == texts(plain[1])
        return
    n_whole = sum(size <= limit for size in sizes)
    held_out, rest = Counter(texts(limited[1])), limit - [0, *sizes][n_whole]
    assert held_out >= Counter(ranked[:n_whole])
    cut = [*(held_out - Counter(ranked[:n_whole]))]
    assert len(cut) == (rest >= 4), "a document is cut if a character of any length fits"
    for end in cut:
        assert ranked[n_whole].endswith(end)
        assert rest - 4 < len(end.encode()) <= rest
        assert ranked[n_whole].removesuffix(end) in texts(limited[0])


LETTERS = st.lists(st.tuples(st.sampled_from(["a", "é", "日", "🎉"]), st.integers(0, 99)), min_size=2, max_size=9)


@given(letters=LETTERS, fraction=st.sampled_from([0.01, 0.1, 0.3]), limit=st.sampled_from([None, 4, 100]))
@settings(deadline=None, max_examples=50)
def test_of_documents_far_from_the_fraction_the_last_one_is_cut(
    letters: list[tuple[str, int]], fraction: float, limit: int | None, folder: Path
) -> None:
    pairs = [(str(i), f"{i}{letter * n}") for i, (letter, n) in enumerate(letters)]
    whole = stored(folder, pairs)
    train, val, data_hash, share = split(whole, fraction, limit)
    wanted = fraction * whole.size
    assert share == 0 or not fraction / 2 <= share <= 2 * fraction
    assert (
        (min(wanted, limit or wanted) / 2 if wanted >= 4 else 0) - 4
        < val.n_bytes
        <= max((1 if share else 2) * wanted, 4)
    )
    assert val.n_bytes > 0
    assert 0 < train.n_bytes == whole.size - val.n_bytes
    cut = [text for text in texts(val) if not text[0].isdigit()]
    assert len(cut) <= 1
    ranked = sorted(pairs, key=lambda pair: hashlib.sha256(pair[0].encode()).digest()[:8])
    for end in cut:  # the beginning of the document trains
        last = ranked[len(texts(val)) - 1][1]
        assert last.endswith(end)
        assert last.removesuffix(end) in texts(train)
        assert data_hash != whole.hash


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8), n_bytes=st.integers(9, 60), size=st.integers(1, 9))
@settings(deadline=None, max_examples=50)
def test_stretches_are_evenly_spaced_and_parted_where_documents_end(
    sizes: list[int], n_bytes: int, size: int, folder: Path
) -> None:
    pairs = [(str(i), chr(97 + i) * n) for i, n in enumerate(sizes)]
    text, n = "".join(letters for _, letters in pairs).encode(), n_bytes // size
    found = [*stretches(stored(folder, pairs).whole(), n_bytes, size)]
    starts = [0] if len(text) <= n_bytes else [i * len(text) // n for i in range(n)]
    length = len(text) if len(text) <= n_bytes else size
    assert [b"".join(pieces) for pieces in found] == [text[start : start + length] for start in starts]
    assert all(len({*piece}) == 1 for pieces in found for piece in pieces), "each piece is of one document"
    assert all(len({*map(bytes, map(set, pieces))}) == len(pieces) for pieces in found), "and of each there is one"


def test_texts_on_both_sides_are_counted(folder: Path) -> None:
    pairs = [(f"{i}", f"text {i % 150}") for i in range(200)]  # 50 texts stand twice
    train, val, *_ = split(stored(folder, pairs), 0.3, None)
    both = [text for text in texts(val) if text in set(texts(train))]
    shared = overlap(train, val)
    assert (shared["n_documents"], shared["of"]) == (len(both), len(texts(val)))
    assert shared["share"] == pytest.approx(len("".join(both)) / val.n_bytes)
    assert 0 < len(both) < len(texts(val))
    single = split(stored(folder, [("name", "some text")]), 0.5, None)  # which is cut
    assert overlap(*single[:2])["share"] == 0


@pytest.mark.parametrize("how", ["the text twice", "a validation text from inside of the training text"])
def test_a_validation_text_in_the_training_text_is_said_once(
    how: str, source: DataConfig, caplog: pytest.LogCaptureFixture
) -> None:
    random, path = Random(0), Path(str(source.path))
    words = ["".join(random.choices("abcdefghij", k=7)) for _ in range(900)]
    text = " ".join(random.choices(words, k=5000))
    path.write_text(text)
    assert (prepare(source, BYTE).copied, caplog.messages) == (0.0, [])
    if how == "the text twice":
        path.write_text(f"{text}\n{text}")
    else:
        inside = path.with_name("inside.txt")
        inside.write_text(text[20_000:24_000])
        source = replace(source, val_path=str(inside))
    for _ in range(2):  # also when the tokens are there
        caplog.clear()
        assert prepare(source, BYTE).copied > 0.9
        (line,) = caplog.messages
        assert re.match(r"data: \d+\.\d % of the places looked at in the validation text stand in the training", line)


# --- text to tokens


@given(text=st.lists(st.sampled_from([*WORDS, *WORDS, *SPACES]), min_size=1).map("".join), data=st.data())
@settings(deadline=None, max_examples=80)
def test_encoding_in_chunks_is_the_same(
    text: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    length, block, group = (data.draw(st.integers(2, 5)) for _ in range(3))
    tokenizer = data.draw(st.sampled_from([TRAINED, byte_tokenizer(), char_tokenizer([text])]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.data.text.CHUNK", length)
        patch.setattr("lm.data.tokenizer.GROUP", group)
        patch.setattr("lm.data.text.BLOCK", block)
        part = stored(tmp_path_factory.getbasetemp(), [("a", text), ("b", text)]).whole()
        assert "".join(chunk for chunk, _ in chunks(decoded(part))) == text * 2
        ids = np.concatenate(list(encode(tokenizer, part)))
    assert ids.tolist() == [tokenizer.eot, *tokenizer.encode(text)] * 2


def lossy(kind: str, path: Path, text: str) -> TokenizerConfig:
    """A tokenizer.json that reproduces `text`, but not every other one."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind != "bytes missing" else []
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([text], trainer)
    backend.normalizer = {"nfc": normalizers.NFC(), "lowercase": normalizers.Lowercase()}.get(kind)
    backend.save(str(path))
    return TokenizerConfig(kind="file", vocab_size=None, path=str(path))


@pytest.mark.parametrize(
    ("kind", "lost", "where"),
    [("bytes missing", "你好", "training"), ("nfc", "e\u0301", "validation"), ("lowercase", "A", "evaluated")],
)
def test_a_tokenizer_that_loses_text_is_refused(
    kind: str, lost: str, where: str, source: DataConfig, tmp_path: Path
) -> None:
    plain = "def f(x):\n    return x\n" * 600
    tokenizer, plain_path, lost_path = (tmp_path / name for name in ("tokenizer.json", "plain.txt", "lost.txt"))
    own = lossy(kind, tokenizer, plain)
    plain_path.write_text(plain)
    lost_path.write_text(plain + lost)
    data = prepare(replace(source, path=str(plain_path)), own)
    assert "".join(itertools.chain(*documents(data))) == plain
    train, val = (plain_path, lost_path) if where == "validation" else (lost_path, plain_path)
    config = replace(source, path=str(train), val_path=str(val))
    use = partial(encode_whole, config, data.tokenizer) if where == "evaluated" else partial(prepare, config, own)
    with pytest.raises(UserError, match=r"^tokenizer: loses part of the text"):
        use()


def test_the_training_text_needs_one_window(source: DataConfig) -> None:
    Path(str(source.path)).write_text("x" * 100)  # of which 91 tokens are for training
    stream = TrainingStream(prepare(replace(source, seq_len=90), BYTE).train, seq_len=90, batch_size=3, seed=0)
    assert stream.batch(0)[0].shape == (3, 90)
    with pytest.raises(UserError, match=r"^data: .* data\.seq_len=91"):
        prepare(replace(source, seq_len=91), BYTE)
    assert len(prepare(replace(source, val_fraction=1e-17), BYTE).val) == 2  # end of text, and a byte
    for text in ("é", ""):
        Path(str(source.path)).write_text(text)
        with pytest.raises(UserError, match=r"^data"):
            prepare(source, BYTE)


# --- the folder


def test_each_split_and_tokenizer_is_built_once(source: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(source, BYTE)
    (first,) = folders(source)
    stamp = (first / "train.bin").stat()
    monkeypatch.chdir(Path(str(source.path)).parent)
    prepare(replace(source, path="corpus.txt", seq_len=4, batch_size=1), BYTE)  # the same file by another path
    assert (folders(source), (first / "train.bin").stat()) == ([first], stamp)
    assert {path.name for path in first.iterdir()} == {"train.bin", "val.bin", "tokenizer.json", "meta.json"}
    prepare(source, BPE)
    prepare(replace(source, val_fraction=0.2), BYTE)
    assert len(folders(source)) == 3


def test_a_changed_text_is_read_again(source: DataConfig) -> None:
    """Also directly after the change before, and with the size and the times of that one."""
    path, words = Path(str(source.path)), ["return", "RETURN", "rEtUrN", "retURN"]
    for how, old, new in zip(("same", "same", "other inode"), words[:-1], words[1:], strict=True):
        before, status = prepare(source, BYTE).hash, path.stat()
        other = path.with_name("new") if how == "other inode" else path
        other.write_text(path.read_text().replace(old, new))
        os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
        other.replace(path)
        data = prepare(source, BYTE)
        assert data.hash != before
        assert "".join(itertools.chain(*documents(data))) == path.read_text()
    os.utime(path)
    assert prepare(source, BYTE).hash == data.hash


def test_a_text_that_was_touched_moved_or_copied_is_not_encoded_again(
    source: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(source, BPE)
    monkeypatch.setattr("lm.data.tokenizer.train_bpe", None)
    path = Path(str(source.path))
    os.utime(path, (1, 1))
    os.chmod(path, 0o600)
    assert prepare(source, BPE).hash == first.hash
    path.rename(moved := path.with_name("moved.txt"))
    assert prepare(replace(source, path=str(moved)), BPE).hash == first.hash
    shutil.copy(moved, copy := path.with_name("copy.txt"))
    assert prepare(replace(source, path=str(copy)), BPE).hash == first.hash
    assert len(folders(source)) == 1


def test_what_lies_beyond_max_bytes_is_not_looked_at(source: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.data.sources.BLOCK", 16)
    path, short = Path(str(source.path)), replace(source, max_bytes=200)
    first = prepare(short, BYTE)
    with path.open("a") as file:
        file.write("more")
    assert prepare(short, BYTE).hash == first.hash
    assert len(folders(source)) == 1


def test_a_text_is_encoded_once(source: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[object] = []
    read = sources.TextFiles.documents
    monkeypatch.setattr(sources.TextFiles, "documents", lambda *given: reads.append(given) or read(*given))
    for _ in range(2):
        prepare(source, BYTE)
        assert len(reads) == 1


def test_a_text_that_changes_while_it_is_read_is_refused(source: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    read = sources.TextFiles.documents

    def documents(self: sources.TextFiles, max_bytes: int | None) -> sources.Documents:
        for name, blocks in read(self, max_bytes):
            with open(str(source.path), "a") as file:
                file.write("more")
            yield name, blocks

    monkeypatch.setattr(sources.TextFiles, "documents", documents)
    with pytest.raises(UserError, match="changed while it was being read"):
        prepare(source, BYTE)
    assert folders(source) == []


@pytest.mark.slow
def test_processes_at_once_write_the_same_folder(source: DataConfig) -> None:
    text = Path(str(source.path)).read_text() * 20
    Path(str(source.path)).write_text(text)
    with ProcessPoolExecutor(4, mp_context=PROCESSES) as pool:
        results = [job.result() for job in [pool.submit(prepare, source, BPE) for _ in range(4)]]
    assert len(folders(source)) == 1
    assert all(documents(data)[0] == [text[: int(len(text) * 0.9)]] for data in results)


def test_what_ends_too_early_leaves_nothing(source: DataConfig) -> None:
    for work in (lambda: prepare(source, BYTE), lambda: encode_whole(source, byte_tokenizer())):
        with small_disk(), pytest.raises(OSError, match="too large") as caught:
            work()
        assert str(caught.value.filename).startswith(source.cache_dir)  # which disk is full
    with pytest.raises(UserError):
        prepare(replace(source, separator="###"), BPE)
    assert folders(source) == []


def test_a_damaged_folder_is_built_again(source: DataConfig) -> None:
    right = prepare(source, BYTE)
    expected = documents(right)
    (folder,) = folders(source)
    whole = (folder / "train.bin").read_bytes()
    damages = {"train.bin": whole[:5] + bytes([whole[5] ^ 1]) + whole[6:], "tokenizer.json": b"{", "val.bin": None}
    for name, damaged in damages.items():
        (left := folder.with_name("other.partial")).mkdir()  # as a killed process leaves it
        (left / "train.bin").touch()
        os.utime(left, (1, 1))
        (folder / name).unlink()  # it is mapped
        if damaged is not None:
            (folder / name).write_bytes(damaged)
        data = prepare(source, BYTE)
        assert documents(data) == expected
        assert (data.hash, data.tokenizer.hash, data.baselines) == (right.hash, right.tokenizer.hash, right.baselines)
        assert folders(source) == [folder]


def test_a_read_only_cache_serves_what_it_holds(source: DataConfig, open_folder: Path) -> None:
    shutil.copy(str(source.path), open_folder / "corpus.txt")
    source = replace(source, path=str(open_folder / "corpus.txt"), cache_dir=str(open_folder / "cache"))
    right = prepare(source, BYTE)
    with as_nobody():
        assert prepare(source, BYTE).hash == right.hash
        with pytest.raises(PermissionError, match=re.escape(source.cache_dir)):
            prepare(replace(source, val_fraction=0.3), BYTE)


@pytest.mark.parametrize("home", [None, "/dev/null"])
def test_without_a_home_the_key_is_named(home: str | None, source: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.setenv("HOME", home) if home else monkeypatch.delenv("HOME")
    own = replace(source, cache_dir=DataConfig().cache_dir)
    with pytest.raises(OSError, match=r"data\.cache_dir=DIR"):
        prepare(own, BYTE)
    assert prepare(source, BYTE).val_bytes
    assert not Path("~").exists()


# --- tokens that were made elsewhere


def test_tokens_that_were_made_elsewhere_are_used_where_they_are(source: DataConfig, tmp_path: Path) -> None:
    given = prepare(source, BPE)
    for name in ("train", "val"):
        np.asarray(getattr(given, name)).astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    (tmp_path / "tokenizer.json").write_text(given.tokenizer.to_json())
    tokenizer = TokenizerConfig(kind="file", vocab_size=None, path=f"{tmp_path}/tokenizer.json")
    config = replace(source, source="tokens", path=f"{tmp_path}/train.bin", val_path=f"{tmp_path}/val.bin")
    data = prepare(config, tokenizer)
    assert np.array_equal(data.train, given.train)
    assert (data.val.tolist(), data.val_bytes) == (given.val.tolist(), given.val_bytes)
    np.asarray(given.train)[::-1].tofile(tmp_path / "train.bin")
    assert prepare(config, tokenizer).hash != data.hash
    (tmp_path / "val.bin").write_bytes(b"\xff\xff")  # a token that the tokenizer does not have
    for wrong, own, key in (
        (config, tokenizer, f"{tmp_path}/val.bin: "),
        (config, BYTE, "tokenizer=byte: "),
        (replace(config, val_path=None), tokenizer, "data.val_path: "),
    ):
        with pytest.raises(UserError, match=f"^{re.escape(key)}"):
            prepare(wrong, own)
    with pytest.raises(UserError, match=r"^data\.path="):
        encode_whole(config, given.tokenizer)


IDS = np.arange(1, 201) % 250 + 1


def npy(ids: np.ndarray) -> bytes:
    np.save(file := io.BytesIO(), ids)
    return file.getvalue()


def raw(ids: np.ndarray, kind: str, cut: int = 0) -> bytes:
    return ids.astype(kind).tobytes()[: -cut or None]


WIDTHS: list[tuple[int, str, bytes, str | None]] = [  # vocabulary, key, content, and the type that is named if refused
    (257, "val_path", raw(IDS, "i8"), "uint16"),
    (257, "val_path", raw(IDS[:2], "u4"), "uint16"),
    (257, "val_path", raw(IDS, ">u2"), "uint16"),
    (257, "path", raw(IDS, "u2", cut=1), "uint16"),
    (65_536, "path", npy(IDS), "uint16"),
    (65_537, "path", raw(IDS, "u2"), "uint32"),
    (65_537, "val_path", raw(IDS, "i8"), "uint32"),
    (257, "val_path", raw(IDS, "u2"), None),
    (65_536, "path", raw(IDS + 65_280, "u2"), None),
    (65_537, "val_path", raw(IDS, "u4"), None),
]
LARGE = [pytest.param(*row, marks=[pytest.mark.slow] * (row[0] > 257)) for row in WIDTHS]


@pytest.mark.parametrize(("vocab_size", "name", "content", "dtype"), LARGE)
def test_tokens_of_another_width_are_refused_by_file_and_type(
    vocab_size: int, name: str, content: bytes, dtype: str | None, source: DataConfig, tmp_path: Path
) -> None:
    layout = json.loads(byte_tokenizer().to_json())
    layout["model"]["vocab"] |= {f"<{i}>": i for i in range(257, vocab_size)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(layout))
    right = IDS.astype(np.uint16 if vocab_size <= 65_536 else np.uint32).tobytes()
    for key in ("path", "val_path"):
        (tmp_path / key).write_bytes(content if key == name else right)
    config = replace(source, source="tokens", seq_len=2, path=f"{tmp_path}/path", val_path=f"{tmp_path}/val_path")
    own = TokenizerConfig(kind="file", vocab_size=None, path=f"{tmp_path}/tokenizer.json")
    if dtype is None:
        data = prepare(config, own)
        assert getattr(data, "train" if name == "path" else "val").tobytes() == content
        return
    with pytest.raises(UserError, match=rf"^{re.escape(str(tmp_path))}/{name}: .*{dtype}"):
        prepare(config, own)


def test_tokens_whose_bytes_cannot_be_told_are_refused_or_that_is_said(
    source: DataConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = lossy("bytes missing", tmp_path / "tokenizer.json", "def a(x):\n    return x\n" * 600)
    layout = json.loads(Path(str(own.path)).read_text())
    layout["model"]["vocab"]["<unk>"] = len(layout["model"]["vocab"])
    layout["model"]["unk_token"], layout["normalizer"] = "<unk>", {"type": "Lowercase"}
    Path(str(own.path)).write_text(json.dumps(layout))
    tokenizer = load_tokenizer(Path(str(own.path)))
    ids = tokenizer.encode("def a(x): return x")
    config = replace(source, source="tokens", seq_len=2, path=f"{tmp_path}/train.bin", val_path=f"{tmp_path}/val.bin")
    np.array(ids, np.uint16).tofile(tmp_path / "train.bin")
    for val in ([*ids, tokenizer.backend.token_to_id("<unk>")], [tokenizer.eot] * 9):
        np.array(val, np.uint16).tofile(tmp_path / "val.bin")
        with pytest.raises(UserError, match=rf"^{re.escape(str(tmp_path))}/val\.bin: "):
            prepare(config, own)
    np.array([tokenizer.eot, *ids], np.uint16).tofile(tmp_path / "val.bin")
    caplog.clear()
    assert prepare(config, own).val_bytes == len("def a(x): return x")
    assert "bits per byte" in caplog.text


@pytest.mark.parametrize("names", [["text.txt"], [f"{i}.txt" for i in range(80)]])
def test_folds_part_a_text_and_one_of_them_is_the_usual_split(names: list[str], tmp_path: Path) -> None:
    """Each byte is held out once, and the training text has the rest."""
    (tmp_path / "texts").mkdir()
    for i, name in enumerate(names):
        (tmp_path / "texts" / name).write_text(f"ä{i} b\n" * (400 if len(names) == 1 else 20))
    config = DataConfig(source="text", path=str(tmp_path / "texts"), seq_len=8, cache_dir=str(tmp_path / "cache"))
    tokenizer = TokenizerConfig(kind="byte", vocab_size=None)
    usual = prepare(config, tokenizer)
    folds = [prepare(replace(config, fold=i), tokenizer) for i in range(config.n_folds)]
    size = sum(path.stat().st_size for path in (tmp_path / "texts").iterdir())
    assert sum(data.val_bytes for data in folds) == size
    same = folds[-1] if len(names) == 1 else folds[0]
    assert (same.val.tolist(), same.train.tolist()) == (usual.val.tolist(), usual.train.tolist())
    assert len({data.hash for data in folds}) == len(folds)
    if len(names) == 1:
        assert folds[3].documents().tolist() == [0, folds[3].documents()[1]], "what stands before and after the fold"
