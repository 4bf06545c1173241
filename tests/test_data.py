"""The token folder is complete or absent, and batches have their properties for every length."""

import itertools
import lzma
import multiprocessing
import random
import resource
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import some, stored
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lm.config import DataConfig, TokenizerConfig, UserError
from lm.data import encoding
from lm.data.batches import IGNORED, TrainingStream, validation_batches, validation_windows
from lm.data.encoding import decoded, encode, pieces
from lm.data.split import Part
from lm.data.tokenizer import Tokenizer
from lm.data.tokens import compressed_bits_per_byte, prepare
from lm.data.vocabulary import byte_tokenizer, char_tokenizer, train_bpe

BYTE, BPE = TokenizerConfig(kind="byte", vocab_size=None), TokenizerConfig(vocab_size=300)
BREAKS = "".join(f"ab {i}\n\n  c\t\r\n d\x1c\n\x85\nf(x);\n" for i in range(30))
SPACES = ["\n", "\n\n", " ", "    ", " \n", "\t", "\r\n", "\x0b", "\x1c", "\x85", "\xa0", "\u2028", "\u3000"]
TRAINED = train_bpe([BREAKS, *(f"a{one}{other}b" * 20 for one in SPACES for other in SPACES)], 330)


@pytest.fixture
def source(corpus: Path, tmp_path: Path) -> DataConfig:
    return DataConfig(source="text", path=str(corpus), seq_len=8, cache_dir=str(tmp_path / "cache"))


def folders(source: DataConfig) -> list[Path]:
    return sorted(path for path in Path(source.cache_dir, "tokens").glob("*") if path.suffix != ".lock")


def streams(tokens: int, seq_len: int, **options: int) -> TrainingStream:
    return TrainingStream(np.arange(tokens), **{"seq_len": seq_len, "batch_size": 1, "seed": 0} | options)


def epoch_of(stream: TrainingStream, epoch: int) -> np.ndarray:
    """The targets of an epoch, a row for each window; each token of `streams` is its own position."""
    first = epoch * stream.per_epoch
    return torch.cat([stream.batch(k)[1] for k in range(first, first + stream.per_epoch)]).numpy()


# --- text to tokens


@given(text=st.lists(st.sampled_from(["a", "b;", "()", "é", *SPACES]), min_size=1).map("".join), data=st.data())
@settings(deadline=None)
def test_encoding_in_pieces_equals_encoding_at_once(
    text: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    length, block, group = (data.draw(st.integers(2, 5)) for _ in range(3))
    tokenizer = data.draw(st.sampled_from([TRAINED, byte_tokenizer(), char_tokenizer([text])]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "PIECE", length)
        patch.setattr(encoding, "GROUP", group)
        patch.setattr("lm.data.split.BLOCK", block)
        part = Part(stored(tmp_path_factory.getbasetemp() / "cache", [("a", text), ("b", text)]))
        assert "".join(piece for piece, _ in pieces(decoded(part))) == text * 2
        found = np.concatenate(list(encode(tokenizer, part)))
    assert found.tolist() == [tokenizer.eot, *tokenizer.encode(text)] * 2


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), char_tokenizer(["acgt"])], ids=["byte", "char"])
def test_a_text_without_spaces_is_cut_too_where_each_character_is_encoded_alone(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(encoding, "PIECE", 10)
    monkeypatch.setattr(encoding, "GROUP", 10)
    part = Part(stored(tmp_path, [("a", "acgt" * 25)]))
    assert [len(ids) for ids in encode(tokenizer, part)] == [11, *[10] * 9]


def test_a_long_text_is_encoded_in_several_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(encoding, "PIECE", 100)
    monkeypatch.setattr(encoding, "GROUP", 100)
    part = Part(stored(tmp_path, [("a", BREAKS)]))
    assert 5 < len(list(pieces(decoded(part)))) <= len(BREAKS) / 100 + 1
    assert len(list(encode(TRAINED, part))) > 5


@pytest.mark.parametrize("kind", [BYTE, BPE, TokenizerConfig(kind="char", vocab_size=None)], ids=lambda kind: kind.kind)
def test_the_token_files_hold_the_text(kind: TokenizerConfig, source: DataConfig) -> None:
    ready, text = prepare(source, kind), Path(str(source.path)).read_text()
    assert ready.tokenizer.decode(ready.train) + ready.tokenizer.decode(ready.val) == text
    assert ready.val_bytes == len(text.encode()) - int(len(text) * 0.9)
    assert [int((part == ready.tokenizer.eot).sum()) for part in (ready.train, ready.val)] == [1, 1]


def test_compression_is_measured_on_the_first_bytes_block_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"{i} is the number of this document\n" * (i % 5 + 1) for i in range(400)]
    part, whole = Part(stored(tmp_path, [(str(i), text) for i, text in enumerate(texts)])), "".join(texts).encode()
    for n in (len(whole), 9_999):
        monkeypatch.setattr("lm.data.tokens.BASELINE_BYTES", n)
        found = compressed_bits_per_byte(part, quiet=False)
        assert found["zlib"] == 8 * len(zlib.compress(whole[:n], 9)) / n
        assert found["lzma"] == 8 * len(lzma.compress(whole[:n], preset=9)) / n
    assert "compressing: " in capsys.readouterr().err


def test_only_a_document_that_is_in_both_parts_is_said_to_be(
    tmp_path: Path, source: DataConfig, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(source, BYTE)  # one document, cut into two parts
    assert caplog.messages == []
    for name in "ab":
        (tmp_path / f"{name}.same").write_text("the same text, more than once. " * 9)
    prepare(replace(source, path=str(tmp_path / "*.same")), BYTE)
    assert caplog.messages == ["data: 1 of 1 validation documents, 100.0 % of their bytes, are training documents too"]


def test_each_document_is_preceded_by_end_of_text(tmp_path: Path, source: DataConfig) -> None:
    for i in range(20):
        (tmp_path / f"{i}.md").write_text(f"document {i}")
    ready = prepare(replace(source, path=str(tmp_path / "*.md")), BYTE)
    eot = ready.tokenizer.eot
    for part in (ready.train, ready.val):
        assert part[0] == eot
        assert int((part == eot).sum()) == ready.tokenizer.decode(part).count("document")
        assert all(ready.tokenizer.decode(part[i + 1 : i + 9]) == "document" for i in np.flatnonzero(part == eot))


@pytest.mark.parametrize(("characters", "dtype"), [(65_535, np.uint16), (65_536, np.uint32)])
def test_the_dtype_of_ids_fits_the_vocabulary_size(characters: int, dtype: type, source: DataConfig) -> None:
    every = "".join(map(chr, itertools.chain(range(0xD800), range(0xE000, 0xE000 + characters - 0xD800))))
    Path(str(source.path)).write_bytes(every.encode())
    ready = prepare(source, TokenizerConfig(kind="char", vocab_size=None))
    assert (ready.tokenizer.vocab_size, ready.train.dtype) == (characters + 1, dtype)
    assert int(ready.val[-1]) == characters


@pytest.mark.parametrize(("seq_len", "fits"), [(89, True), (90, True), (91, False)])
def test_the_training_text_needs_one_window(seq_len: int, fits: bool, source: DataConfig) -> None:
    Path(str(source.path)).write_text("x" * 100)
    config = replace(source, seq_len=seq_len)
    if fits:
        stream = TrainingStream(prepare(config, BYTE).train, seq_len=seq_len, batch_size=3, seed=0)
        assert next(iter(stream))[0].shape == (3, seq_len)
    else:
        with pytest.raises(UserError, match=r"training text has 91 tokens, data.seq_len=91 needs 92"):
            prepare(config, BYTE)


def test_a_text_of_one_character_is_refused(source: DataConfig) -> None:
    Path(str(source.path)).write_text("é")
    with pytest.raises(UserError, match="the training text has 0 tokens"):
        prepare(source, BYTE)


# --- the folder


def test_each_text_split_and_tokenizer_has_a_folder_that_is_built_once(source: DataConfig) -> None:
    prepare(source, BYTE)
    (first,) = folders(source)
    stamp = (first / "train.bin").stat()
    prepare(replace(source, seq_len=4, batch_size=1), BYTE)
    assert folders(source) == [first]
    assert (first / "train.bin").stat() == stamp
    prepare(source, BPE)
    prepare(source, replace(BPE, vocab_size=301))
    prepare(replace(source, val_fraction=0.2), BYTE)
    with open(str(source.path), "a") as file:
        file.write(".")
    prepare(source, BYTE)
    assert len(folders(source)) == 5
    assert all(len(folder.name) == 16 for folder in folders(source))


def test_an_existing_folder_is_only_read(source: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(source, BYTE)
    monkeypatch.setattr("filelock.FileLock", lambda path: pytest.fail(f"{path}: may be read-only"))
    prepare(source, BYTE)


def test_a_tiny_validation_fraction_leaves_one_token(source: DataConfig) -> None:
    assert len(prepare(replace(source, val_fraction=1e-17), BYTE).val) == 2  # end of text, and a byte


def test_ten_processes_at_once_build_the_folder_once(source: DataConfig) -> None:
    text = Path(str(source.path)).read_text() * 60
    Path(str(source.path)).write_text(text)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lm.data.tokens"])
    partial, incomplete = set(), []
    with ProcessPoolExecutor(10, mp_context=context) as pool:
        jobs = [pool.submit(prepare, source, BPE) for _ in range(10)]
        while not all(job.done() for job in jobs):
            for path in Path(source.cache_dir).glob("*/*"):
                if path.suffix == ".partial":
                    with suppress(FileNotFoundError):  # it may be renamed meanwhile
                        partial.add(path.stat().st_ino)
                elif path.is_dir() and not (path / "meta.json").exists():
                    incomplete.append(path)
        found = [job.result() for job in jobs]
    assert len(partial) <= 2  # of the text, and of the tokens
    assert incomplete == []
    assert len(folders(source)) == 1
    assert all(np.array_equal(one.train, found[0].train) for one in found)
    assert found[0].tokenizer.decode(found[0].train) == text[: int(len(text) * 0.9)]


@contextmanager
def small_disk() -> Iterator[None]:
    """No file can grow beyond 4 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_build_on_a_full_disk_leaves_nothing(source: DataConfig) -> None:
    with small_disk(), pytest.raises(OSError, match=r"requested and \d+ written|too large"):
        prepare(source, BYTE)
    assert folders(source) == []


def test_a_build_of_bad_input_leaves_nothing(source: DataConfig) -> None:
    with pytest.raises(UserError):
        prepare(source, replace(BPE, vocab_size=100_000))
    assert folders(source) == []


def test_a_partial_folder_of_a_killed_process_is_replaced(source: DataConfig) -> None:
    prepare(source, BYTE)
    (folder,) = folders(source)
    shutil.move(folder, folder.with_suffix(".partial"))
    (folder.with_suffix(".partial") / "junk").write_text("of a killed process")
    prepare(source, BYTE)
    assert folders(source) == [folder]
    assert not (folder / "junk").exists()


FILES = ("train.bin", "val.bin", "tokenizer.json")


def damage(path: Path, draw: random.Random) -> None:
    whole = path.read_bytes()
    at = draw.randrange(len(whole))
    match draw.choice(["byte", "cut", "longer", "empty", "absent"]):
        case "byte":
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
        case "cut":
            path.write_bytes(whole[:at])
        case "longer":
            path.write_bytes(whole + b"0")
        case "empty":
            path.write_bytes(b"")
        case "absent":
            path.unlink()


@pytest.mark.parametrize("name", some(FILES, 2))
def test_a_damaged_folder_is_built_again(name: str, source: DataConfig) -> None:
    right, draw = prepare(source, BYTE), random.Random(0)
    train, val = np.array(right.train), np.array(right.val)  # the files of the mapped ones are damaged
    (folder,) = folders(source)
    for _ in range(12):
        damage(folder / name, draw)
        found = prepare(source, BYTE)
        assert np.array_equal(found.train, train)
        assert np.array_equal(found.val, val)
        assert (found.hash, found.tokenizer.hash, found.val_bytes) == (
            right.hash,
            right.tokenizer.hash,
            right.val_bytes,
        )
        assert found.baselines == right.baselines
        assert folders(source) == [folder]


# --- batches for training

LENGTHS = {"tokens": st.integers(2, 200), "seq_len": st.integers(1, 200), "seed": st.integers(0, 5)}


@given(**LENGTHS, k=st.integers(0, 1000), batch_size=st.integers(1, 5))
@settings(deadline=None)
def test_a_batch_is_a_function_of_seed_and_index(tokens: int, seq_len: int, seed: int, k: int, batch_size: int) -> None:
    assume(tokens > seq_len)
    options = {"seed": seed, "batch_size": batch_size}
    inputs, targets = streams(tokens, seq_len, **options).batch(k)
    used = streams(tokens, seq_len, **options)
    for other in (k + 7, 3, 0):
        used.batch(other)
    started = next(iter(streams(tokens, seq_len, **options, start=k)))
    for again in (used.batch(k), started):
        assert torch.equal(inputs, again[0])
        assert torch.equal(targets, again[1])
    assert inputs.shape == targets.shape == (batch_size, seq_len)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs + 1, targets)  # each token is its own position
    assert int(inputs.min()) >= 0
    assert int(targets.max()) < tokens


@given(**LENGTHS)
@settings(deadline=None)
def test_an_epoch_has_each_token_as_target_at_most_once(tokens: int, seq_len: int, seed: int) -> None:
    assume(tokens > seq_len)
    stream = streams(tokens, seq_len, seed=seed)
    for epoch in (0, 1, 5):
        targets = epoch_of(stream, epoch)
        assert len(np.unique(targets)) == targets.size  # never twice
        assert targets.size >= max(
            seq_len, tokens - 1 - 2 * (seq_len - 1)
        )  # all except a part of a window at either end


def test_epochs_together_cover_every_token_in_different_orders() -> None:
    stream = streams(200, 8)
    epochs = [epoch_of(stream, epoch) for epoch in range(40)]
    assert set(np.concatenate(epochs).ravel()) == set(range(1, 200))
    assert len({tuple(targets[:, 0]) for targets in epochs}) == 40
    assert not np.array_equal(epoch_of(streams(200, 8, seed=1), 0), epochs[0])


@given(**LENGTHS, k=st.integers(0, 50), world=st.integers(1, 4), batch_size=st.integers(1, 3))
@settings(deadline=None)
def test_ranks_share_the_batch_of_one_process(
    tokens: int, seq_len: int, seed: int, k: int, world: int, batch_size: int
) -> None:
    assume(tokens > seq_len)
    parts = [
        streams(tokens, seq_len, seed=seed, batch_size=batch_size, rank=rank, world_size=world).batch(k)[0]
        for rank in range(world)
    ]
    assert torch.equal(torch.cat(parts), streams(tokens, seq_len, seed=seed, batch_size=batch_size * world).batch(k)[0])


@pytest.mark.parametrize("n", [1, 3])
def test_overfitting_repeats_the_first_batches(n: int) -> None:
    plain, again = streams(200, 8, batch_size=4), streams(200, 8, batch_size=4, overfit_batches=n)
    for k, (inputs, targets) in enumerate(itertools.islice(again, 3 * n)):
        assert torch.equal(inputs, plain.batch(k % n)[0])
        assert torch.equal(targets, plain.batch(k % n)[1])


# --- batches for validation


@given(tokens=st.integers(2, 200), seq_len=st.integers(1, 200), batch_size=st.integers(1, 9))
@settings(deadline=None)
def test_validation_has_each_token_except_the_first_as_target_once_in_order(
    tokens: int, seq_len: int, batch_size: int
) -> None:
    batches = list(validation_batches(np.arange(tokens, dtype=np.uint16), seq_len, batch_size))
    inputs, targets = (torch.cat([batch[i] for batch in batches]) for i in (0, 1))
    real = targets != IGNORED
    assert targets[real].tolist() == list(range(1, tokens))
    assert torch.equal(inputs[real] + 1, targets[real])
    assert int(inputs.min()) >= 0
    assert all(1 <= len(batch[0]) <= batch_size for batch in batches)
    assert inputs.shape[1] == seq_len
    assert len(inputs) == -(-(tokens - 1) // seq_len)


@given(windows=st.integers(1, 400), seq_len=st.integers(1, 9), batch_size=st.integers(1, 9), n=st.integers(1, 60))
@settings(deadline=None)
def test_an_estimate_takes_the_middle_of_each_of_equal_stretches(
    windows: int, seq_len: int, batch_size: int, n: int
) -> None:
    tokens = np.arange(windows * seq_len + 1, dtype=np.uint16)
    chosen = validation_windows(len(tokens), seq_len, batch_size, n)
    k = min(windows, n * batch_size)
    assert len(chosen) == k
    assert all(i * windows / k <= window + 0.5 <= (i + 1) * windows / k for i, window in enumerate(chosen))
    batches = list(validation_batches(tokens, seq_len, batch_size, n))
    assert len(batches) == -(-k // batch_size)
    assert torch.cat([inputs for inputs, _ in batches])[:, 0].tolist() == (chosen * seq_len).tolist()


def test_an_estimate_that_covers_the_text_is_the_score() -> None:
    assert validation_windows(100, 8, 2, 7).tolist() == validation_windows(100, 8, 2).tolist() == list(range(13))
