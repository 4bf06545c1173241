"""`run_dir=RUN` continues a run or shows it, wherever its text lies by then; `init_from=RUN` starts one from it."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lm import load_model
from lm.cli.arguments import hydra_words, kinds_of
from lm.cli.compose import compose
from lm.config import ModelConfig, RunConfig
from lm.data.batches import TrainingStream
from lm.data.tokenizer import byte_tokenizer
from lm.folder import save_model
from lm.lab.init_from.base import read_base
from lm.model.init import named_seed
from lm.training.loss import plain
from lm.training.train import train
from tests.helpers.refusals import refused
from tests.helpers.runs import MODEL, RUN, at_home, composed, data_of, files, outcome, result, rows, stop
from tests.helpers.tiny import TEXT, TINY_RUN

WORDS = [*TINY_RUN, "head=untied", "model.dropout=0.1", "seed=3", "optim.betas=[0.7,0.9]", "data.path=t.txt"]
slow = pytest.mark.slow


# --- run_dir=RUN


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What the undisturbed run leaves."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "t.txt").write_text(TEXT)
    train(composed(*WORDS, f"data.path={folder / 't.txt'}", f"run_dir={folder / 'run'}"))
    return outcome(RunConfig(run_dir=str(folder / "run")))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of t.txt and of a run in runs/, which SIGTERM has ended after step 12 of 20."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "t.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        byte_tokenizer().backend.save("own.json")
        tokenizer = ["tokenizer.kind=file", "tokenizer.path=own.json"]
        stop(composed(*WORDS, *tokenizer, "logger=tensorboard", "checkpoint.keep=7"), 12)
        Path("own.json").unlink()
    return folder


@pytest.fixture
def run_dir(stopped, tmp_path, monkeypatch):
    """The directory of a copy of that run, whose text and runs/ lie in the working directory."""
    shutil.copytree(stopped, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    (path,) = Path("runs").iterdir()
    assert not (path / "result.json").exists()
    return path


def test_the_same_command_continues_its_run_and_then_shows_it(run_dir, caplog):
    (run_dir / "metrics.csv").unlink()
    folder, scores = train(composed(*WORDS, "data.path=./t.txt"))
    assert folder == run_dir
    assert folder.name.endswith(scores["config_hash"][:8])
    assert (scores["steps"], scores["resumed_from"]) == (20, [12])
    assert train(composed(*WORDS, f"data.path={Path('t.txt').absolute()}")) == (run_dir, scores)
    os.utime("t.txt", (2e9, 2e9))
    late = ["diagnostics.every=1", "logger=tensorboard", "prompts=[a]"]
    assert train(composed(f"run_dir={run_dir}", *late)) == (run_dir, scores)
    assert "without effect on a finished run: prompts, diagnostics, logger;" in caplog.text
    assert "has changed since" not in caplog.text
    Path("t.txt").write_text(Path("t.txt").read_text().upper())
    os.utime("t.txt", (1e9, 1e9))
    assert train(composed(f"run_dir={run_dir}")) == (run_dir, scores)
    assert "its text has changed since; this result is of what it was" in caplog.text
    Path("t.txt").unlink()
    assert train(composed(f"run_dir={run_dir}")) == (run_dir, scores), "without its text"


def test_a_text_that_has_moved_is_named_in_any_way(run_dir):
    Path("t.txt").rename("moved.txt")
    run = composed(f"run_dir={run_dir}", "data.path=moved.txt")
    for words in (["data=text", "data.path=moved.txt", f"run_dir={run_dir}"], ["moved.txt", f"run_dir={run_dir}"]):
        assert compose("train", hydra_words(words, kinds_of(RunConfig)), RunConfig) == run


@slow
def test_a_run_whose_text_has_moved_is_continued_at_its_new_place(run_dir, whole):
    Path("elsewhere").mkdir()
    Path("t.txt").rename("elsewhere/renamed.md")
    with refused(r"^data\.path=t\.txt: "):
        train(composed(f"run_dir={run_dir}"))
    train(composed(f"run_dir={run_dir}", "data.path=elsewhere/renamed.md"))
    assert outcome(RunConfig(run_dir=str(run_dir))) == whole


NOTHING, CUDA, THREADS = ("", ""), ("accelerator: cpu", "accelerator: cuda"), ("threads: 1", "threads: 99999")
MANY = ["seed=9", "head=tied", "data=text", "data.path=gone.txt", "checkpoint.resume=false"]


@pytest.mark.parametrize(
    ("saved", "words", "message"),
    [
        (NOTHING, ["trainer.max_steps=99"], r"trainer\.max_steps=20 there, trainer\.max_steps=99 now.*init_from"),
        (NOTHING, ["threads=2"], r"\(threads is 1 there, 2 now\): continue it with threads=1"),
        (NOTHING, MANY, r"holds another run \(.*head\.[^)]*; seed is 3 there, 9 now"),
        (NOTHING, ["data.path=other.txt"], r"data\.path is .* there, other\.txt now"),
        (CUDA, [], r": trainer\.accelerator=cuda"),
        (CUDA, WORDS, r"trainer\.accelerator is cuda there.*: continue it with trainer\.accelerator=cuda"),
        (THREADS, [], ": threads=99999"),
    ],
)
def test_a_run_that_cannot_be_continued_is_named_with_what_it_has(saved, words, message, run_dir):
    Path("other.txt").write_text(TEXT + "one line more\n")
    config = run_dir / "config.yaml"
    config.write_text(config.read_text().replace(*saved))
    before = files(run_dir)
    with refused(rf"^run_dir={run_dir}\b.*{message}"):
        train(composed(f"run_dir={run_dir}", *words))
    assert files(run_dir) == before


def test_a_class_that_a_file_names_is_imported_only_if_it_is_typed(run_dir):
    config = run_dir / "config.yaml"
    config.write_text(config.read_text().replace("linear: linear", "linear: no_such_module.Linear"))
    with refused(r"model\.linear=no_such_module\.Linear"):
        composed(f"run_dir={run_dir}")
    typed = composed(f"run_dir={run_dir}", "model.linear=no_such_module.Linear")
    assert typed.model.linear == "no_such_module.Linear"


@pytest.mark.parametrize("path", ["texts/*.txt", "."])
def test_a_finished_run_is_shown_wherever_its_text_lies(path, tmp_path, monkeypatch, lab):
    """Also if the run is called as its text, if the text is gone, and with the copy of a tokenizer."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path / "texts" if path == "." else tmp_path)
    byte_tokenizer().backend.save("own.json")
    words = [*MODEL, *RUN, f"data.path={path}", "tokenizer=file", "tokenizer.path=own.json"]
    code, shown, error = lab("train", *words, "run_dir=runs/texts", f"data.cache_dir={tmp_path}/cache")
    assert code == 0, error
    assert lab("evaluate", "runs/texts")[0] == 0
    run = Path("runs/texts").resolve()
    monkeypatch.chdir(tmp_path / "texts")
    assert lab("evaluate", f"run_dir={run}")[0] == 0, "from another folder"
    for left in (tmp_path / "texts/a.txt", run.parents[1] / "own.json"):
        left.unlink()
    shutil.rmtree(tmp_path / "cache")
    code, shown_again, said = lab("train", f"run_dir={run}")
    assert (code, shown_again.splitlines()[:6]) == (0, shown.splitlines()[:6]), said


# --- init_from=RUN


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a text and a finished run on it, `tied`."""
    home = tmp_path_factory.mktemp("home")
    (home / "text").write_text(TEXT)
    train(at_home(home, *MODEL, "tokenizer=char", f"run_dir={home / 'tied'}"))
    return home


@pytest.fixture(scope="module")
def untied(home):
    """Another one, which is untied and has learned positions."""
    learned = ["head=untied", "model.position=learned", "model.previous_token_init=0", "tokenizer=byte"]
    return train(at_home(home, *MODEL, *learned, f"run_dir={home / 'untied'}"))[0]


def start(base, *overrides):
    return at_home(base.parent, f"init_from={base}", *overrides)


@pytest.mark.parametrize(
    ("overrides", "key", "cause"),
    [
        ("model.n_layers=4", "model.n_layers=4", "model.n_layers="),  # the default
        ("model=small seed=3", "model.n_layers=4", "model="),
        ("experiment=shakespeare_char tokenizer=char", "model.n_layers=3", "experiment="),
        ("tokenizer=file tokenizer.path=/absent", "tokenizer.path=/absent", "tokenizer.path="),
        ("init_sha256=00", "init_sha256=00", "init_sha256="),
    ],
)
def test_what_contradicts_the_loaded_run_is_refused_by_key_and_by_its_cause(home, overrides, key, cause):
    with refused(f"^{key}: .*; leave out {cause}$"):
        start(home / "tied", *overrides.split())


def test_a_class_of_a_loaded_run_is_imported_by_consent_alone(home, tmp_path):
    net, tokenizer = load_model(home / "tied")
    net.config = replace(net.config, linear="mine.Part")
    shutil.copytree(home / "tied", tmp_path / "r")
    save_model(net, tokenizer, tmp_path / "r/model")
    with refused(r"add model\.linear=mine\.Part"):
        at_home(home, f"init_from={tmp_path / 'r'}")
    assert at_home(home, f"init_from={tmp_path / 'r'}", "model.linear=mine.Part").model.linear == "mine.Part"
    with refused(r"has mine\.Part; type model\.linear=mine\.Part$"):
        at_home(home, f"init_from={tmp_path / 'r'}", "model.linear=linear")


def test_the_first_loss_is_the_loaded_models(home, tmp_path):
    """With all validation batches, to the last bit; and with a learning rate of zero the last one too."""
    run = start(home / "tied", "optim.lr=0", "optim.adam_lr=0", f"run_dir={tmp_path / 'r'}")
    (folder, scores), base = train(run), result(home / "tied")
    record = scores["init_from"]
    assert record["val_loss"] == base["val_loss"] == scores["val_loss"]
    assert (record["path"], record["sha256"]) == (str(home / "tied"), run.init_sha256)
    assert (record["head"], record["steps"], record["tokens"]) == ("tied", 12, 12 * 128)
    chain = read_base(str(folder / "model"))
    assert (chain.steps, chain.tokens, chain.made_by) == (24, 24 * 128, {"kind": "char", "vocab_size": None})
    net, _ = load_model(home / "tied")
    data, seed = data_of(run), named_seed(0, "continued")  # the order of batches is not repeated
    batch = TrainingStream(data.train, seq_len=32, batch_size=4, seed=seed).batch(0)
    assert float(rows(folder)[0]["train/loss"]) == pytest.approx(plain(net, *batch).item(), abs=1e-5)


def test_a_chain_from_weights_without_a_record_has_unknown_steps(home, tmp_path):
    shutil.copytree(home / "tied/model", tmp_path / "weights")
    run_dir, scores = train(at_home(home, f"init_from={tmp_path / 'weights'}", f"run_dir={tmp_path / 'first'}"))
    assert scores["init_from"]["steps"] is read_base(str(run_dir)).steps is None


def test_a_loaded_model_that_is_tied_by_a_rule_reports_both_losses(untied, tmp_path):
    _, scores = train(start(untied, "head=tied", "init_tied_matrix=mean", f"run_dir={tmp_path / 'r'}"))
    assert scores["init_from"]["val_loss"] > result(untied)["val_loss"] + 0.01


@slow
def test_without_a_checkpoint_the_same_weights_are_needed(home, untied, tmp_path):
    base, run = tmp_path / "base", tmp_path / "r"
    shutil.copytree(home / "tied", base)
    _, expected = train(at_home(home, f"init_from={base}", f"run_dir={run}"))
    (run / "result.json").unlink()
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(base)
    with refused(f"^init_from={base}: "):
        train(composed(f"run_dir={run}"))
    shutil.copytree(untied, base)
    with refused(f"^init_from={base}: .*hash"):
        train(composed(f"run_dir={run}"))
    _, scores = train(composed(f"run_dir={run}", f"init_from={home / 'tied'}"))
    assert scores["val_loss"] == expected["val_loss"]


@slow
def test_what_the_loaded_model_cannot_do_is_named(home, untied, tmp_path):
    base, new = home / "tied", f"run_dir={tmp_path / 'new'}"
    (tmp_path / "other").write_text("é" * 2000)
    tied = start(base, new)
    for wrong, message in (
        (start(base, f"data.path={tmp_path / 'other'}", new), "'é'"),
        (start(base, "head=tied", "init_tied_matrix=head", new), "^init_tied_matrix=head: the loaded model has one"),
        (start(base, "head=tied_projected", "init_tied_matrix=head", new), "^init_tied_matrix=head: the loaded model"),
        (start(base, "head=tied_scaled", new), "^head: has one matrix, and its head.embedding_multiplier is "),
        (at_home(home, "init_tied_matrix=mean", new), "^init_tied_matrix=mean: "),
        (start(untied, "init_tied_matrix=mean", new), "^init_tied_matrix=mean: is for a head of one matrix"),
        (replace(tied, model=ModelConfig()), r"^model\.n_layers=4: init_from="),  # in Python
        (replace(tied, tokenizer=start(untied).tokenizer), "^tokenizer: init_from="),
    ):
        with refused(message):
            train(wrong)
        assert not (tmp_path / "new").exists()
