"""Data sets of the Hub, read from a server in this process that answers as the Hub does."""

import itertools
import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import hub
import huggingface_hub.constants
import huggingface_hub.utils._http
import pytest
from conftest import Script
from helpers.texts import documents

from lm.config import BadInput, DataConfig, EvaluateConfig, TokenizerConfig
from lm.data import tables
from lm.data.paths import check_paths
from lm.data.sources import Hub, open_source
from lm.data.tokens import prepare
from lm.inference.text import own_validation

BYTES = TokenizerConfig(kind="byte", vocab_size=None)
STORIES = {
    "README.md": hub.card(
        {"small": {"train": "small/train-*", "validation": "small/val-*"}, "large": {"train": "large/*"}}
    ),
    "small/train-00000-of-00002.parquet": hub.shard([f"story {i}\n" for i in range(300)], score=list(range(300))),
    "small/train-00001-of-00002.parquet": hub.shard([f"story {i}\n" for i in range(300, 400)], score=[0] * 100),
    "small/val-00000-of-00001.parquet": hub.shard([f"other {i}" for i in range(20)], score=[0] * 20),
    "large/a.parquet": hub.shard(
        [f"{i} " * 3000 for i in range(400)], rows=20, url=[f"{i:05}" * 3000 for i in range(400)]
    ),
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[hub.Hub]:
    with hub.serve() as running:
        for module in datasets.config, huggingface_hub.constants:
            monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", running.address)
        template = huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE
        template = template.replace(huggingface_hub.constants.ENDPOINT, running.address)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
        yield running


def config(tmp_path: Path, **settings: Any) -> DataConfig:
    given = {"source": "hub", "path": "owner/stories", "name": "small", "cache_dir": str(tmp_path / "cache")}
    return DataConfig(**(given | settings))


def read(config: DataConfig, split: str = "train") -> list[str]:
    found = open_source(replace(config, split=split)).documents(None)
    return [text.decode() for _, blocks in found if (text := b"".join(blocks))]


def refusal(config: DataConfig, split: str = "train") -> str:
    with pytest.raises(BadInput) as caught:
        read(config, split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def resolve(config: DataConfig) -> str:
    source = open_source(config)
    assert isinstance(source, Hub)
    return source.commit


def test_a_configuration_a_revision_and_a_split_are_read(server: hub.Hub, tmp_path: Path) -> None:
    first = server.commit("owner/stories", STORIES)
    one = config(tmp_path)
    assert resolve(one) == first
    assert read(one) == [f"story {i}\n" for i in range(400)]
    assert read(one, "validation") == [f"other {i}" for i in range(20)]
    assert read(replace(one, name="large"))[7] == "7 " * 3000
    newer = server.commit("owner/stories", STORIES | {"small/train-00001-of-00002.parquet": hub.shard(["new"])})
    server.branches["owner/stories", "v1"] = first
    assert resolve(one) == resolve(replace(one, revision="main")) == newer
    assert read(one)[300:] == ["new"]
    assert resolve(replace(one, revision="v1")) == first
    assert len(read(replace(one, revision=first))) == len(read(replace(one, revision="v1"))) == 400


def test_a_whole_commit_hash_is_taken_at_its_word(server: hub.Hub, tmp_path: Path) -> None:
    assert resolve(config(tmp_path, revision="0" * 40)) == "0" * 40
    assert server.asked == []


def test_rows_and_columns_that_are_not_wanted_are_not_downloaded(
    server: hub.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "RANGE", 1 << 16)
    server.commit("owner/stories", STORIES)
    some = itertools.islice(open_source(config(tmp_path, name="large")).documents(None), 30)
    assert [b"".join(blocks).decode() for _, blocks in some] == [f"{i} " * 3000 for i in range(30)]
    assert 300_000 < server.sent["large/a.parquet"] < len(STORIES["large/a.parquet"]) / 6


def test_files_that_are_not_parquet_are_read_by_the_library(server: hub.Hub, tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"row {i}\n", "n": i}) + "\n" for i in range(30)).encode()
    server.commit("owner/lines", {"train.jsonl": rows, "validation.jsonl": rows[: rows.index(b"\n") + 1]})
    one = config(tmp_path, path="owner/lines", name=None)
    assert read(one) == [f"row {i}\n" for i in range(30)]
    assert read(one, "validation") == ["row 0\n"]
    assert refusal(replace(one, column="n")) == "data.column=n: row 0 holds 0, not a string"
    assert refusal(replace(one, column="m")) == "data.column=m: the columns are text, n"


def test_the_layout_of_tinystories_is_understood(server: hub.Hub, tmp_path: Path) -> None:
    """A repository whose card names no files, with text and arrays beside the Parquet files."""
    files = {
        "README.md": b"---\nlicense: cdla-sharing-1.0\nlanguage:\n- en\n---\nstories\n",
        "TinyStories-train.txt": b"once\n",
        "TinyStories-valid.txt": b"upon\n",
        "MLP_input_output.npy": b"0",
        "Evaluation prompts.yaml": b"- a\n",
        "data/train-00000-of-00002-2d5a1467fff1081b.parquet": hub.shard(["a"]),
        "data/train-00001-of-00002-5852b56a2bd28fd9.parquet": hub.shard(["b"]),
        "data/validation-00000-of-00001-869c898b519ad725.parquet": hub.shard(["c"]),
    }
    server.commit("roneneldan/TinyStories", files)
    one = config(tmp_path, path="roneneldan/TinyStories", name=None)
    assert (read(one), read(one, "validation")) == (["a", "b"], ["c"])


def test_a_local_folder_of_the_same_name_is_not_read(
    server: hub.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.commit("owner/stories", STORIES)
    (tmp_path / "owner/stories").mkdir(parents=True)
    (tmp_path / "owner/stories/train.txt").write_text("mine\n")
    monkeypatch.chdir(tmp_path)
    assert read(config(tmp_path), "validation")[0] == "other 0"


def test_what_there_is_not_is_one_line_that_says_what_there_is(server: hub.Hub, tmp_path: Path) -> None:
    commit = server.commit("owner/stories", STORIES)
    one = config(tmp_path)
    for name in ("smal", None):
        message = refusal(replace(one, name=name))
        assert message.startswith(f"data.name={name}: ")
        assert "['small', 'large']" in message
    assert refusal(one, "test") == "data.split=test: the splits of owner/stories are train, validation"
    assert refusal(replace(one, column="story")) == "data.column=story: the columns are text, score"
    assert refusal(replace(one, column="score")) == "data.column=score: row 0 holds 0, not a string"
    for revision in ("v2", "0" * 40):
        assert refusal(replace(one, revision=revision)).startswith(f"data.revision={revision}: no such branch, tag or")
    assert refusal(replace(one, path="owner/x")).startswith("data.path=owner/x: no such data set on the Hub")
    assert (
        refusal(replace(one, path="a/b/c")) == "data.path=a/b/c: expected OWNER/NAME, the name of a data set on the Hub"
    )
    server.commit("owner/empty", {"README.md": b"nothing"})
    assert refusal(replace(one, path="owner/empty", name=None)).startswith("data.path=owner/empty: ")
    assert len(commit) == 40


def test_a_wrong_validation_split_is_found_before_the_training_text_is_read(server: hub.Hub, tmp_path: Path) -> None:
    server.commit("owner/stories", STORIES)
    with pytest.raises(BadInput) as caught:
        prepare(config(tmp_path, val_split="val"), BYTES)
    assert str(caught.value) == "data.val_split=val: the splits of owner/stories are train, validation"
    assert set(server.sent) == {"README.md"}


def test_what_needs_a_login_says_how(server: hub.Hub, tmp_path: Path) -> None:
    commit = server.commit("owner/stories", STORIES)
    one = config(tmp_path)
    server.private.add("owner/stories")
    assert refusal(one) == (
        "data.path=owner/stories: no such data set on the Hub; if it is a private one, log in by `hf auth login` or set"
        " HF_TOKEN"
    )
    server.private.clear()
    server.gated.add("owner/stories")
    for revision in None, commit:
        said = refusal(replace(one, revision=revision))
        assert said.startswith("data.path=owner/stories: its owner grants access on request; ask for it at http")
    server.members.add("Bearer hf_right")
    huggingface_hub.utils._http.close_session()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_right")
        assert len(read(one)) == 400


# --- a server that is slow, breaks off or is away


def test_a_download_that_breaks_off_goes_on_from_there(server: hub.Hub, tmp_path: Path) -> None:
    server.commit("owner/stories", STORIES)
    server.cut["large/a.parquet"] = [1_000_000]
    assert read(config(tmp_path, name="large")) == [f"{i} " * 3000 for i in range(400)]
    assert server.cut["large/a.parquet"] == []


def count_waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The libraries do not wait before they try again; the list receives the seconds for which they would have."""
    waits: list[float] = []
    for module in huggingface_hub.utils._http, datasets.utils.file_utils:
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=waits.append))
    return waits


def test_a_server_that_stays_broken_is_one_line_and_leaves_nothing(
    server: hub.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = count_waits(monkeypatch)
    server.commit("owner/stories", STORIES)
    one, shard = config(tmp_path), "small/train-00001-of-00002.parquet"
    server.fault = lambda path: 503 if path.endswith(shard) else None
    with pytest.raises(BadInput, match=r"^data\.path=owner/\w+: http://127\.0\.0\.1:\d+ answers with status 503$"):
        prepare(one, BYTES)
    assert 10 < sum(waits) < 60  # seconds that the library would have waited
    assert not list(tmp_path.glob("cache/*/*/*"))
    server.fault = lambda path: None
    server.cut[shard] = [100] * 99
    with pytest.raises(
        BadInput,
        match=r"^data\.path=owner/\w+: http://127\.0\.0\.1:\d+ cannot be read \(\w*Error: peer closed connection",
    ):
        prepare(one, BYTES)
    assert not list(tmp_path.glob("cache/*/*/*"))
    server.cut.clear()
    assert sum(map(len, documents(prepare(one, BYTES)))) == 400


def test_files_that_are_not_parquet_are_not_asked_for_again_for_minutes(
    server: hub.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = count_waits(monkeypatch)
    server.commit("owner/lines", {"train.jsonl": b'{"text": "a"}\n' * 30})
    server.cut["train.jsonl"] = [100] * 999
    with pytest.raises(BadInput, match=r"^data\.path=owner/\w+: http://127\.0\.0\.1:\d+ cannot be read \("):
        prepare(config(tmp_path, path="owner/lines", name=None), BYTES)
    assert 0 < sum(waits) < 60


def test_another_version_in_the_cache_of_the_library_is_not_taken(
    server: hub.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_waits(monkeypatch)
    server.commit("owner/stories", STORIES)
    datasets.load_dataset("owner/stories", "small", cache_dir=str(datasets.config.HF_DATASETS_CACHE))
    server.commit("owner/stories", STORIES | {"small/train-00001-of-00002.parquet": hub.shard(["new"])})
    server.fault = lambda path: 503 if path.endswith("README.md") else None
    with pytest.raises(BadInput, match=r"^data\.path=owner/stories: .* \(ConnectionError: its files cannot be listed"):
        prepare(config(tmp_path), BYTES)


def test_a_slow_download_is_interrupted_at_once_and_leaves_nothing(server: hub.Hub, tmp_path: Path) -> None:
    server.commit("owner/stories", STORIES)
    server.delay = 0.02
    main, whole = threading.main_thread(), len(STORIES["large/a.parquet"])

    def interrupt() -> None:
        while server.sent["large/a.parquet"] < whole / 3:
            time.sleep(0.01)
        signal.pthread_kill(main.ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        prepare(config(tmp_path, name="large"), BYTES)
    assert server.sent["large/a.parquet"] < whole * 2 / 3
    assert not list(tmp_path.glob("cache/*/*/*"))


def test_a_text_that_was_read_needs_no_network(
    server: hub.Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commit = server.commit("owner/stories", STORIES)
    branch, pinned = (config(tmp_path, val_split="validation", revision=one) for one in (None, commit))
    data = prepare(branch, BYTES)
    assert data.revision == commit
    assert prepare(branch, TokenizerConfig(kind="char", vocab_size=None)).hash == data.hash
    sent = dict(server.sent)
    server.asked.clear()
    assert prepare(pinned, BYTES).hash == data.hash
    assert server.asked == []
    server.fault = lambda path: 500
    assert prepare(branch, BYTES).hash == data.hash
    assert f"status 500; the version of the last time is used: {commit}" in caplog.text
    assert dict(server.sent) == sent
    with pytest.raises(BadInput, match=r"answers with status 500$"):
        prepare(replace(pinned, name="large", val_split=None), BYTES)
    with pytest.raises(BadInput, match=r"answers with status 500$"):
        prepare(replace(branch, revision="v1"), BYTES)


@pytest.mark.usefixtures("server")
def test_without_a_network_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert refusal(config(tmp_path)).startswith(
        "data.path=owner/stories: http://127.0.0.1:9 cannot be read (ConnectError: "
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert refusal(config(tmp_path)).startswith(
        "data.path=owner/stories: http://127.0.0.1:9 cannot be read (OfflineModeIsEnabled: "
    )


# --- published validation texts


def test_a_published_split_is_the_whole_validation_text(server: hub.Hub, tmp_path: Path) -> None:
    server.commit("owner/stories", STORIES)
    one = config(tmp_path, val_split="validation")
    first = prepare(one, BYTES)
    train, val = [f"story {i}\n" for i in range(400)], [f"other {i}" for i in range(20)]
    assert documents(first) == (train, val)
    assert first.val_bytes == sum(map(len, val))
    few = prepare(replace(one, max_bytes=25, seq_len=8), BYTES)
    assert documents(few) == (["story 0\n", "story 1\n", "story 2\n", "s"], val)
    newer = hub.shard([f"another {i} " * 50 for i in range(400)])
    server.commit("owner/stories", STORIES | {"small/val-00000-of-00001.parquet": newer})
    server.sent.clear()
    second = prepare(one, BYTES)
    assert documents(second) == (train, [f"another {i} " * 50 for i in range(400)])
    assert server.sent["small/val-00000-of-00001.parquet"] < len(newer) * 1.5  # once
    assert len({first.hash, second.hash, few.hash, prepare(replace(one, val_split=None), BYTES).hash}) == 4


def test_rows_may_be_the_lines_of_one_text(server: hub.Hub, tmp_path: Path) -> None:
    lines = ["", " = Title = \n", "", " A line . \n", " Another \n"]
    server.commit("owner/wiki", {"data/train-0.parquet": hub.shard(lines), "data/test-0.parquet": hub.shard(lines[:2])})
    one = config(tmp_path, path="owner/wiki", name=None, val_split="test", seq_len=8)
    joined = prepare(replace(one, rows="lines"), BYTES)
    assert documents(joined) == (["".join(lines)], [" = Title = \n"])
    assert documents(prepare(one, BYTES))[0] == [" = Title = \n", " A line . \n", " Another \n"]
    cut = prepare(replace(one, rows="lines", val_split=None, val_fraction=0.5), BYTES)
    assert documents(cut) == ([" = Title = \n A l"], ["ine . \n Another \n"])
    assert len({joined.hash, cut.hash, prepare(one, BYTES).hash}) == 3


def test_a_validation_file_is_the_whole_validation_text(tmp_path: Path) -> None:
    for name, text in ("a.txt", "training\n" * 3), ("b.txt", "more\n"), ("val/c.txt", "validation\n"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    one = DataConfig(
        source="text", path=f"{tmp_path}/*.txt", val_path=f"{tmp_path}/val", seq_len=8, cache_dir=f"{tmp_path}/cache"
    )
    data = prepare(one, BYTES)
    assert documents(data) == (["training\ntraining\ntraining\n", "more\n"], ["validation\n"])
    (tmp_path / "val/c.txt").write_text("changed\n")
    assert prepare(one, BYTES).hash != data.hash
    for path, said in (
        (f"{tmp_path}/b.txt", f"{tmp_path}/b.txt belongs to data.path={tmp_path}/*.txt as well"),
        (f"{tmp_path}/none", "no such file, folder or glob"),
    ):
        with pytest.raises(BadInput) as caught:
            prepare(replace(one, val_path=path), BYTES)
        assert str(caught.value) == f"data.val_path={path}: {said}"
    with pytest.raises(BadInput, match=r"^data\.val_path=.*/none: no such file"):
        check_paths(replace(one, val_path=f"{tmp_path}/none"), BYTES)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"val_split": "train"}, "data.val_split=train: is the training text as well"),
        (
            {"val_split": "test", "val_fraction": 0.2},
            "data.val_fraction=0.2: nothing is held out beside data.val_split",
        ),
        ({"val_split": "test", "val_max_bytes": None}, "data.val_max_bytes=None: nothing is held out beside data.val"),
        (
            {"val_path": "x"},
            "data.val_path=x: is for data=text or json or csv or parquet or tokens, not data.source=hub",
        ),
        ({"source": "text", "val_split": "test"}, "data.val_split=test: is for data=hub, not data.source=text"),
        ({"source": "text", "val_path": "a/b"}, "data.val_path=a/b: is the training text as well"),
        ({"source": "text", "name": "x"}, "data.name=x: is for data=hub, not data.source=text"),
        ({"source": "json", "revision": "v1"}, "data.revision=v1: is for data=hub, not data.source=json"),
        ({"source": "csv", "split": "test"}, "data.split=test: is for data=hub, not data.source=csv"),
        (
            {"source": "text", "column": "body"},
            "data.column=body: is for data=json or csv or parquet or hub, not data.",
        ),
        ({"source": "text", "rows": "lines"}, "data.rows=lines: is for data=json or csv or parquet or hub, not data."),
        ({"rows": "words"}, "data.rows=words: choose one of documents, lines"),
        ({"name": ""}, "data.name: is empty"),
        ({"source": "stdlib", "path": None, "val_path": "x"}, "data.val_path=x: is for data=text or json or csv or"),
    ],
)
def test_settings_that_contradict_each_other_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        DataConfig(**({"source": "hub", "path": "a/b"} | settings))
    assert str(caught.value).startswith(said)


def write_config(folder: Path, data: DataConfig, **more: Any) -> None:
    settings = {"data": asdict(data), "tokenizer": asdict(BYTES), "data_hash": "", "tokenizer_hash": ""}
    (folder / "config.yaml").write_text(json.dumps(settings | more))


def test_a_run_is_scored_on_the_commit_that_it_was_trained_on(server: hub.Hub, tmp_path: Path) -> None:
    server.commit("owner/stories", STORIES)
    one = config(tmp_path, val_split="validation")
    data = prepare(one, BYTES)
    hashes = {"data_hash": data.hash, "tokenizer_hash": data.tokenizer.hash}
    write_config(tmp_path, one, data_revision=data.revision, **hashes)
    server.commit("owner/stories", STORIES | {"small/val-00000-of-00001.parquet": hub.shard(["another"])})
    server.asked.clear()
    tokens, n_bytes, *_ = own_validation(tmp_path, trust=True)
    assert (tokens.tolist(), n_bytes) == (data.val.tolist(), data.val_bytes)
    assert server.asked == []


def test_a_validation_text_from_an_address_is_not_read_without_trust(tmp_path: Path) -> None:
    write_config(tmp_path, DataConfig(source="text", path="a.txt", val_path="http://127.0.0.1:9/b.txt"))
    with pytest.raises(BadInput, match=r"its text comes from http://127\.0\.0\.1:9/b\.txt; trust=true downloads it$"):
        own_validation(tmp_path, trust=False)


def test_evaluate_takes_one_text() -> None:
    with pytest.raises(BadInput, match=r"^data\.val_split=test: "):
        EvaluateConfig(run_dir="r", data=DataConfig(source="hub", path="a/b", val_split="test"))


# --- the experiments that are included


@pytest.mark.slow
def test_an_experiment_from_download_to_evaluation(script: Script, tmp_path: Path) -> None:
    """experiment=tinystories with a smaller model, from a server that has other stories under its name."""
    stories = [
        f"Once upon a time there was a {i} . It was red and big and it liked the {i % 7} . The end .\n"
        for i in range(900)
    ]
    with hub.serve() as running:
        commit = running.commit(
            "roneneldan/TinyStories",
            {
                "data/train-00000-of-00001-2d5a1467fff1081b.parquet": hub.shard(stories),
                "data/validation-00000-of-00001-869c898b519ad725.parquet": hub.shard(stories[:40]),
            },
        )
        env = {"HF_ENDPOINT": running.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        small = ["model.n_layers=1", "model.d_model=32", "model.n_heads=2", "model.d_ff=64", "tokenizer.vocab_size=300"]
        words = [*small, f"data.revision={commit}", "data.seq_len=32", "trainer.max_steps=2", "run_dir=r", "threads=1"]
        trained = script("train", "experiment=tinystories", *words, env=env)
        assert trained.returncode == 0, trained.stderr
        assert "of 40 validation documents, 100.0 % of their bytes, are training documents too" in trained.stderr
        result = json.loads((tmp_path / "r/result.json").read_text())
        assert result["data_revision"] == commit
        refused = script("evaluate", "run_dir=r", env=env)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert (
            refused.stderr == "error: run_dir=r: its text comes from roneneldan/TinyStories; trust=true downloads it\n"
        )
        sent = dict(running.sent)
        running.fault = lambda path: 500
        scored = script("evaluate", "run_dir=r", "trust=true", env=env)
        assert scored.returncode == 0, scored.stderr
        assert json.loads(scored.stdout)["loss"] == pytest.approx(result["val_loss"], abs=1e-6)
        assert json.loads(scored.stdout)["bytes"] == sum(map(len, stories[:40]))
        assert dict(running.sent) == sent
