"""A source becomes one text, which is split by rules, then token files that are complete, current and lossless."""

import hashlib
import io
import itertools
import json
import os
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lm.config import DataConfig, TokenizerConfig
from lm.data import sources
from lm.data import text as module
from lm.data.text import chunks, split
from lm.data.tokenizer import byte_tokenizer, char_tokenizer, encode, train_bpe
from lm.data.tokens import encode_whole, prepare
from tests.helpers.limits import as_nobody, small_disk
from tests.helpers.refusals import refused
from tests.helpers.texts import BYTE, documents, stored, texts, write_rows

BPE = TokenizerConfig(vocab_size=300)
BREAKS = "".join(f"ab {i}\n\n  c\t\r\n d\x1c\n\x85\nf(x);\n" for i in range(30))
WORDS = ["a", "b;", "()", "é", "1", "s", "'", "_", "你", "。"]  # between which ByteLevel ends a word, or not
SPACES = ["\n", "\n\n", " ", "    ", " \n", "\t", "\r\n", "\x0b", "\x1c", "\x85", "\xa0", "\u2028", "\u3000"]
PAIRS_OF_WORDS = [f"{word}{other}a1" * 20 for word in WORDS for other in WORDS]
TRAINED = train_bpe([BREAKS, *(f"a{space}{other}b" * 20 for space in SPACES for other in SPACES), *PAIRS_OF_WORDS], 400)
LETTERS = st.lists(st.tuples(st.sampled_from("aé日🎉"), st.integers(0, 99)), min_size=2, max_size=10)


@pytest.fixture
def source(corpus, tmp_path):
    return DataConfig(source="text", path=str(corpus), seq_len=8, cache_dir=str(tmp_path / "cache"))


def folders(source):
    return sorted(Path(source.cache_dir, "tokens").glob("*"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("text")


def test_the_hash_is_of_sizes_names_and_texts_in_order(folder):
    def hash_of(*pairs):
        return stored(folder, pairs).hash

    given = hash_of(("é.txt", "text é"), ("empty", ""), ("b", "c\n"))
    assert given == hash_of(("é.txt", "text é"), ("b", "c\n")), "a document without text counts for nothing"
    others = (
        [("b", "c\n"), ("é.txt", "text é")],
        [("é.txt", "text é"), ("a", "c\n")],
        [("é.txt", "text éc"), ("b", "\n")],
    )
    assert len({given, *(hash_of(*pairs) for pairs in others)}) == 4


# --- the split


@given(text=st.text(min_size=2), fraction=st.floats(0.01, 0.99), limit=st.integers(4, 30), block=st.integers(2, 9))
def test_the_end_of_a_single_text_is_held_out_by_characters_up_to_the_limit(text, fraction, limit, block, folder):
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


@given(letters=LETTERS, fraction=st.sampled_from([0.01, 0.1, 0.3, 0.5]), limit=st.sampled_from([None, 4, 30, 100]))
@settings(max_examples=50)
@example(letters=[("a", 4), ("a", 3)], fraction=0.5, limit=None)  # both have a low hash
@example(letters=[("a", 9), ("a", 40)], fraction=0.5, limit=None)  # much less than a half of the text
def test_documents_of_lowest_hash_are_held_out_and_the_last_one_may_be_cut(letters, fraction, limit, folder):
    """It is cut where they have more than the limit, or a size that is far from the fraction."""
    pairs = [(f"{letter}{n}.{i}", f"{i}{letter * n}") for i, (letter, n) in enumerate(letters)]
    positions = {text: int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64 for name, text in pairs}
    ranked = sorted(positions, key=positions.get)
    n_usual = min(max(sum(position < fraction for position in positions.values()), 1), len(pairs) - 1)
    usual = sum(len(text.encode()) for text in ranked[:n_usual])
    whole = stored(folder, pairs)
    train, val, data_hash, share = split(whole, fraction, limit)
    wanted, most = fraction * whole.size, limit or whole.size
    limited = min(usual, most)
    is_far = limited > 2 * wanted or (wanted >= 4 and limited < min(wanted, most) / 2)
    assert share == (limited / whole.size if is_far else 0)
    bound = min(most, max(int(wanted), 4) if share else usual)
    assert bound - 4 < val.n_bytes <= bound
    if share == 0 and usual <= most:
        assert (val.n_bytes, data_hash) == (usual, whole.hash)
    assert val.n_bytes == usual or data_hash != whole.hash
    assert 0 < train.n_bytes == whole.size - val.n_bytes
    held_out, trained = ([text for text in texts(part) if text in positions] for part in (val, train))
    assert {*held_out} == {*ranked[: len(held_out)]}
    assert trained == [text for _, text in pairs if text in trained]
    for end in {*texts(val)} - {*held_out}:  # the beginning of that document trains
        assert f"{({*texts(train)} - {*trained}).pop()}{end}" == ranked[len(held_out)]


def test_a_validation_text_in_the_training_text_is_said_once(source, caplog):
    random, path = Random(0), Path(source.path)
    words = ["".join(random.choices("abcdefghij", k=7)) for _ in range(900)]
    text = " ".join(random.choices(words, k=5000))
    path.write_text(text)
    assert (prepare(source, BYTE).copied, caplog.messages) == (0.0, [])
    (inside := path.with_name("inside.txt")).write_text(text[20_000:24_000])
    (twice := path.with_name("twice.txt")).write_text(f"{text}\n{text}")
    rows = write_rows(path.with_name("rows.jsonl"), words * 2)
    changes = {"val_path": str(inside)}, {"path": str(twice)}, {"source": "json", "path": str(rows)}
    for change, share in zip(changes, (0.9, 0.9, 0.3), strict=True):
        for _ in range(2):  # also when the tokens are there
            caplog.clear()
            copied = prepare(replace(source, **change), BYTE).copied
            assert copied > share
            (line,) = caplog.messages
            assert f"{100 * copied:.1f} % of the " in line


def test_the_folds_of_a_text_have_one_note(source, caplog):
    Path(source.path).write_text("An end <|endoftext|> of 4711 lines.\n" * 4711)
    caplog.set_level("INFO")
    for fold in (0, 1, 2):
        prepare(replace(source, fold=fold), BYTE)
    assert caplog.text.count("spells <|endoftext|> 4,711 times") == 1


# --- text to tokens


@given(text=st.lists(st.sampled_from([*WORDS, *WORDS, *SPACES]), min_size=1).map("".join), data=st.data())
@settings(max_examples=50)
def test_encoding_in_chunks_is_the_same(text, data, tmp_path_factory):
    length, block, group = (data.draw(st.integers(2, 5)) for _ in range(3))
    tokenizer = data.draw(st.sampled_from([TRAINED, byte_tokenizer(), char_tokenizer([text])]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.data.text.CHUNK", length)
        patch.setattr("lm.data.tokenizer.GROUP", group)
        patch.setattr("lm.data.text.BLOCK", block)
        part = stored(tmp_path_factory.getbasetemp(), [("a", text), ("b", text)]).whole()
        assert "".join(chunk for chunk, _ in chunks(part)) == text * 2
        ids = np.concatenate(list(encode(tokenizer, part)))
    assert ids.tolist() == [tokenizer.eot, *tokenizer.encode(text)] * 2


def test_the_training_text_needs_one_window(source):
    Path(source.path).write_text("x" * 100)  # of which 91 tokens are for training
    assert len(prepare(replace(source, seq_len=90), BYTE).train) == 91
    with refused(r"^data: .* data\.seq_len=91"):
        prepare(replace(source, seq_len=91), BYTE)
    assert len(prepare(replace(source, val_fraction=1e-17), BYTE).val) == 2  # end of text, and a byte
    for text in ("é", ""):
        Path(source.path).write_text(text)
        with refused(r"^data"):
            prepare(source, BYTE)


# --- the folder


@pytest.fixture
def reads(monkeypatch):
    """What was read of plain text."""
    calls, documents_in = [], sources.TextFiles.documents
    monkeypatch.setattr(sources.TextFiles, "documents", lambda *given: calls.append(given) or documents_in(*given))
    return calls


def test_a_text_is_encoded_once_for_each_split_and_tokenizer_wherever_it_lies(source, reads, monkeypatch):
    first, path = prepare(source, BYTE), Path(source.path)
    names = sorted(file.name for file in folders(source)[0].iterdir())
    assert names == ["meta.json", "tokenizer.json", "train.bin", "val.bin"], "the text itself is not kept"
    moved = path.rename(path.with_name("moved.txt"))
    os.utime(moved, (1, 1))
    monkeypatch.chdir(path.parent)
    for place in (moved, "moved.txt"):
        assert prepare(replace(source, path=str(place), seq_len=4, batch_size=1), BYTE).hash == first.hash
    assert (len(folders(source)), len(reads)) == (1, 1)
    for config, tokenizer in ((source, BPE), (replace(source, val_fraction=0.2), BYTE)):
        prepare(replace(config, path=str(moved)), tokenizer)
    assert (len(folders(source)), len(reads)) == (3, 3)
    monkeypatch.setattr("lm.data.tokens.files_hash", lambda patterns: "of another clone")
    prepare(replace(source, path=str(moved)), BYTE)
    assert (len(folders(source)), len(reads)) == (4, 4)


def test_a_changed_text_is_read_again_also_of_the_size_and_the_times_of_before(source):
    path = Path(source.path)
    before, status = prepare(source, BYTE).hash, path.stat()
    path.write_text(path.read_text().swapcase())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    data = prepare(source, BYTE)
    assert data.hash != before
    assert "".join(itertools.chain(*documents(data))) == path.read_text()


def test_bytes_that_are_read_in_another_way_are_another_text(source, tmp_path):
    """An ending decides how a table is parted and whether a file is compressed."""
    hashes = set()
    for name in ("t.csv", "t.tsv"):
        (tmp_path / name).write_text("text\n" + '"a ""b"" c"\n' * 40)
        hashes |= {prepare(replace(source, source="csv", path=f"{tmp_path}/{name}"), BYTE).hash}
    assert len(hashes) == 2
    prepare(source, BYTE)
    shutil.copy(source.path, tmp_path / "named.txt.gz")
    with refused("gzip"):
        prepare(replace(source, path=f"{tmp_path}/named.txt.gz"), BYTE)


def test_what_lies_beyond_max_bytes_is_not_looked_at_but_all_of_a_validation_text(source, reads, monkeypatch):
    monkeypatch.setattr("lm.data.sources.BLOCK", 16)
    val = Path(source.path).with_name("val.txt")
    val.write_text("a validation text of its own. " * 200)
    config = replace(source, max_bytes=200, val_path=str(val))
    before = prepare(config, BYTE).hash
    for path, n_reads in ((source.path, 2), (val, 4)):  # two texts at a time
        with open(path, "a") as file:
            file.write("more")
        assert (prepare(config, BYTE).hash == before, len(reads)) == (n_reads == 2, n_reads)


def test_a_text_that_changes_while_it_is_read_is_refused(source, monkeypatch):
    read = sources.TextFiles.documents

    def documents(self):
        for name, blocks in read(self):
            with open(source.path, "a") as file:
                file.write("more")
            yield name, blocks

    monkeypatch.setattr(sources.TextFiles, "documents", documents)
    with refused("changed while it was being read"):
        prepare(source, BYTE)
    assert folders(source) == []


def test_what_ends_too_early_leaves_nothing(source):
    for work in (lambda: prepare(source, BYTE), lambda: encode_whole(source, byte_tokenizer())):
        with small_disk(), pytest.raises(OSError, match="too large") as caught:
            work()
        assert str(caught.value.filename).startswith(source.cache_dir)  # which disk is full
    with refused(r"^data\.separator=###: "):
        prepare(replace(source, separator="###"), BPE)
    assert folders(source) == []


def test_a_damaged_folder_is_built_again(source):
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
        assert (documents(data), data.hash, data.baselines) == (expected, right.hash, right.baselines)
        assert folders(source) == [folder]


def test_a_read_only_cache_serves_what_it_holds(source, open_folder):
    shutil.copy(source.path, open_folder / "corpus.txt")
    source = replace(source, path=str(open_folder / "corpus.txt"), cache_dir=str(open_folder / "cache"))
    right = prepare(source, BYTE)
    with as_nobody():
        assert prepare(source, BYTE).hash == right.hash
        with pytest.raises(PermissionError, match=re.escape(source.cache_dir)):
            prepare(replace(source, val_fraction=0.3), BYTE)


# --- tokens that were made elsewhere

IDS = np.arange(1, 201) % 250 + 1


def raw(ids, kind):
    return np.asarray(ids).astype(kind).tobytes()


def npy(ids):
    np.save(file := io.BytesIO(), ids)
    return file.getvalue()


def elsewhere(source, folder, path=None, val_path=None, vocab_size=257, unk_token=None, normalizer=None):
    """The settings of two files of tokens and their tokenizer."""
    layout = json.loads(byte_tokenizer().to_json()) | {"normalizer": normalizer}
    layout["model"]["vocab"] |= {f"<{i}>": i for i in range(257, vocab_size)}
    layout["model"]["unk_token"] = unk_token
    (folder / "tokenizer.json").write_text(json.dumps(layout))
    dtype = "u2" if vocab_size <= 65_536 else "u4"
    (folder / "path").write_bytes(path or raw(IDS, dtype))
    (folder / "val_path").write_bytes(val_path or raw(IDS, dtype))
    config = replace(source, source="tokens", seq_len=2, path=f"{folder}/path", val_path=f"{folder}/val_path")
    return config, TokenizerConfig(kind="file", vocab_size=None, path=f"{folder}/tokenizer.json")


def test_tokens_that_were_made_elsewhere_need_a_tokenizer_and_a_validation_text(source, tmp_path):
    config, own = elsewhere(source, tmp_path)
    data = prepare(config, own)
    assert data.train.tolist() == data.val.tolist() == IDS.tolist()
    elsewhere(source, tmp_path, path=raw(IDS[::-1], "u2"))
    assert prepare(config, own).hash != data.hash
    for use, key in (
        (partial(prepare, config, BYTE), "tokenizer=byte: "),
        (partial(prepare, replace(config, val_path=None), own), "data.val_path: "),
        (partial(encode_whole, config, data.tokenizer), "data.path="),
    ):
        with refused(f"^{re.escape(key)}"):
            use()


WIDTHS = [  # vocabulary, key, content, and the type that is named if refused
    (257, "val_path", raw(IDS, "i8"), "uint16"),
    (257, "val_path", raw(IDS, ">u2"), "uint16"),
    (257, "path", raw(IDS, "u2")[:-1], "uint16"),
    (257, "path", npy(IDS), "uint16"),
    (65_537, "path", raw(IDS, "u2"), "uint32"),
    (65_536, "path", raw(IDS + 65_280, "u2"), None),
    (65_537, "val_path", raw(IDS, "u4"), None),
]
LARGE = [pytest.param(*row, marks=[pytest.mark.slow] * (row[0] > 257)) for row in WIDTHS]


@pytest.mark.parametrize(("vocab_size", "key", "content", "dtype"), LARGE)
def test_tokens_of_another_width_are_refused_by_file_and_type(vocab_size, key, content, dtype, source, tmp_path):
    config, own = elsewhere(source, tmp_path, vocab_size=vocab_size, **{key: content})
    if dtype is None:
        data = prepare(config, own)
        assert (data.train if key == "path" else data.val).tobytes() == content
        return
    with refused(rf"^{re.escape(str(tmp_path))}/{key}: .*{dtype}"):
        prepare(config, own)


def test_tokens_whose_bytes_cannot_be_told_are_refused_or_that_is_said(source, tmp_path, caplog):
    """Those of an unknown token, of no text, and of a tokenizer that changes its text."""
    bytes_of_ab = [0, *byte_tokenizer().encode("ab")]
    for ids, unk_token, words in ([*bytes_of_ab, 257], "<257>", "the token 257"), ([0] * 3, None, "no text"):
        config, own = elsewhere(source, tmp_path, val_path=raw(ids, "u2"), vocab_size=258, unk_token=unk_token)
        with refused(rf"^{re.escape(str(tmp_path))}/val_path: .*{words}"):
            prepare(config, own)
    caplog.clear()
    config, own = elsewhere(source, tmp_path, val_path=raw(bytes_of_ab, "u2"), normalizer={"type": "Lowercase"})
    assert prepare(config, own).val_bytes == 2
    assert "bits per byte" in caplog.text


@pytest.mark.parametrize("n_files", [1, 80])
def test_folds_part_a_text_and_one_of_them_is_the_usual_split(n_files, source, tmp_path):
    """Each byte is held out once, and the training text has the rest."""
    (tmp_path / "texts").mkdir()
    for i in range(n_files):
        (tmp_path / f"texts/{i}.txt").write_text(f"ä{i} b\n" * (400 if n_files == 1 else 20))
    config = replace(source, path=str(tmp_path / "texts"), val_fraction=0.25)
    usual = prepare(config, BYTE)
    folds = [prepare(replace(config, fold=i), BYTE) for i in range(4)]
    assert config.n_folds == len({data.hash for data in folds}) == 4
    assert sum(data.val_bytes for data in folds) == sum(path.stat().st_size for path in (tmp_path / "texts").iterdir())
    same = folds[-1] if n_files == 1 else folds[0]
    assert (same.val.tolist(), same.train.tolist()) == (usual.val.tolist(), usual.train.tolist())
    if n_files == 1:
        assert len(folds[1].document_starts()) == 2, "what stands before and after the fold"
        sizes = [prepare(replace(config, val_fraction=0.15, fold=i), BYTE).val_bytes for i in range(7)]
        assert max(sizes) - min(sizes) <= 2, "of bytes; a character has two at most"
        with refused(r"^data.val_fraction=0.7: "):
            replace(config, val_fraction=0.7, fold=0)
