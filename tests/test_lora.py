"""LoRA: adapters alone train, model/ holds the merged model, and PEFT reads adapter/."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HEADS, SEQ, TEXT, TIED, VOCAB, tiny
from helpers.words import CLOCK, MODEL, RUN
from hydra import initialize_config_dir
from safetensors.torch import load_file
from torch import Tensor

from lm.ablation.plan.compose import compose_arms, compose_base
from lm.cli.compose import compose
from lm.cli.mistakes import CONFIGS
from lm.cli.tables import summary
from lm.config import BadInput, DiagnosticsConfig, EvaluateConfig, ModelConfig, RunConfig
from lm.config.ablation import AblationConfig
from lm.data.vocabulary import byte_tokenizer
from lm.exchange.adapter import merged, save_adapter
from lm.exchange.base import read_base
from lm.exchange.huggingface import export
from lm.exchange.portable import load_model
from lm.inference.evaluate import evaluate_run
from lm.model.lora import LoRALinear, is_adapter
from lm.model.size import n_params, n_params_trained
from lm.model.transformer import Transformer
from lm.training.train import train

LORA = ["model.linear=lora", "model.lora_rank=2"]
LLAMA = {"ffn": "swiglu", "bias": True}
each = pytest.mark.parametrize


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and a finished run on it."""
    home = tmp_path_factory.mktemp("home")
    (home / "text").write_text(TEXT)
    train(composed(home, *MODEL, "tokenizer=byte", f"run_dir={home / 'base'}"))
    return home


def composed(home: Path, *words: str) -> RunConfig:
    places = [f"data.path={home / 'text'}", f"data.cache_dir={home / 'cache'}"]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", [*RUN, *places, *words], RunConfig)


def result_of(run: RunConfig) -> dict[str, Any]:
    return train(run)[1]


def start(home: Path, run_dir: Path, *words: str) -> RunConfig:
    return composed(home, f"init_from={home / 'base'}", *LORA, f"run_dir={run_dir}", *words)


def weights(run_dir: Path) -> dict[str, Tensor]:
    return load_file(run_dir / "model/model.safetensors")


def checkpoint(run_dir: Path) -> dict[str, Tensor]:
    """The model of the newest checkpoint, adapters and all."""
    path = max((run_dir / "checkpoints").glob("step-*"))
    state = torch.load(path, weights_only=True)["state_dict"]
    return {name.removeprefix("net."): tensor for name, tensor in state.items()}


def adapted(head: str = "tied", **changes: Any) -> Transformer:
    """A model whose adapters are not zero."""
    config = tiny(**{"linear": "lora", "lora_rank": 3, "lora_alpha": 5.0, "residual_scale": 1.0} | changes)
    net = Transformer(config, HEADS[head], vocab_size=257, seq_len=SEQ).eval()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if is_adapter(name):
                parameter.copy_(torch.randn(parameter.shape, generator=noise) * 0.1)
    return net


def logits(net: Transformer) -> Tensor:
    with torch.no_grad():
        return net(torch.randint(257, (2, SEQ), generator=torch.Generator().manual_seed(0)))


def furthest(one: Tensor, other: Tensor) -> float:
    """The largest difference as a fraction of the largest logit."""
    return float((one - other).abs().max() / other.abs().max())


# --- the model


@each("residual_scale", [None, 3.0])
def test_a_model_begins_as_one_without_adapters(residual_scale: float | None) -> None:
    """With equal weights bit for bit; neither their scale nor B at zero changes the initial A."""
    config = tiny(**LLAMA, residual_scale=residual_scale)
    plain = Transformer(config, TIED, vocab_size=VOCAB, seq_len=SEQ)
    net = Transformer(replace(config, linear="lora"), TIED, vocab_size=VOCAB, seq_len=SEQ)
    there, here = plain.state_dict(), net.state_dict()
    assert all(torch.equal(here[name], there[name]) for name in there)
    assert {name for name in here if name not in there} == {name for name in here if is_adapter(name)}
    for name, tensor in here.items():
        if ".lora_A." in name:
            bound = tensor.shape[1] ** -0.5
            assert 0.9 * bound < tensor.abs().max() <= bound
        elif ".lora_B." in name:
            assert not tensor.any()
    tokens = torch.arange(SEQ)[None]
    assert torch.equal(net(tokens), plain(tokens))


def test_rank_alpha_and_targets_are_those_of_the_settings() -> None:
    net = adapted(lora_targets=["q_proj", "down_proj"])
    found = {name: module for name, module in net.named_modules() if isinstance(module, LoRALinear)}
    assert {name.rpartition(".")[2] for name in found} == {"q_proj", "down_proj"}
    assert all(one.scale == 5 / 3 and one.lora_A.weight.shape[0] == 3 for one in found.values())
    trained = sum(3 * (one.in_features + one.out_features) for one in found.values())
    assert n_params_trained(net) == trained
    assert n_params(net) == n_params(merged(net)) + trained


@each("head", ["tied", "untied", "tied_projected"])
def test_merging_changes_no_logits_and_leaves_a_tied_matrix_one(head: str) -> None:
    net = adapted(head, **LLAMA)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    whole = merged(net)
    assert whole.config == tiny(**LLAMA, residual_scale=1.0)
    assert furthest(logits(whole), logits(net)) < 1e-5
    moved = {name for name, tensor in whole.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {f"{name}.weight" for name, module in net.named_modules() if isinstance(module, LoRALinear)}
    assert (whole.head.matrix(whole.embed.weight) is whole.embed.weight) == (head == "tied")
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert merged(whole) is whole


# --- a run


@each(("optim", "head"), [("adamw", "untied_from_embedding"), ("muon", "tied")])
def test_adapters_alone_train(home: Path, tmp_path: Path, optim: str, head: str) -> None:
    run = start(
        home, tmp_path / "r", f"optim={optim}", f"head={head}", "optim.weight_decay=0.5", "optim.warmup_steps=0"
    )
    result, base, after = result_of(run), weights(home / "base"), checkpoint(tmp_path / "r")
    if head != "tied":
        base["head.proj.weight"] = base["embed.weight"]
    assert {name for name in after if not is_adapter(name)} == base.keys()
    assert all(torch.equal(after[name], base[name]) for name in base)
    fresh = Transformer(run.model, run.head, vocab_size=257, seq_len=32, seed=run.seed).state_dict()
    assert not any(torch.equal(after[name], fresh[name]) for name in after if is_adapter(name))
    assert result["init_from"]["val_loss"] == json.loads((home / "base/result.json").read_text())["val_loss"]
    assert result["val_loss"] < result["init_from"]["val_loss"]
    n_adapters = sum(tensor.numel() for name, tensor in after.items() if is_adapter(name))
    assert (result["n_params_trained"], result["n_params_by_role"]["adapter"]) == (n_adapters, n_adapters)
    assert f", {n_adapters:,} of which train" in dict(summary(result))["parameters"]


def test_model_is_whole_and_merged(home: Path, tmp_path: Path) -> None:
    """So it is evaluated, exported and continued as any other; a tied matrix is one and the base's."""
    result = result_of(start(home, tmp_path / "r"))
    net, tokenizer = load_model(tmp_path / "r")
    assert net.config == load_model(home / "base")[0].config
    assert weights(tmp_path / "r").keys() == weights(home / "base").keys()
    assert torch.equal(net.embed.weight, weights(home / "base")["embed.weight"])
    assert evaluate_run(EvaluateConfig(run_dir=str(tmp_path / "r"), threads=1))["loss"] == result["val_loss"]
    assert export(net, tokenizer, tmp_path / "out") == "Qwen3ForCausalLM"
    again = composed(home, f"init_from={tmp_path / 'r'}", *LORA, f"run_dir={tmp_path / 'again'}")
    found = result_of(again)
    assert found["init_from"]["val_loss"] == result["val_loss"]
    assert (found["init_from"]["steps"], again.init_sha256) == (24, read_base(str(tmp_path / "r")).sha256)


def test_a_resume_needs_no_base_and_ends_the_same(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "base", tmp_path / "base")
    words = [f"init_from={tmp_path / 'base'}", *LORA]
    whole = result_of(composed(home, *words, f"run_dir={tmp_path / 'whole'}"))
    shutil.copytree(tmp_path / "whole", tmp_path / "r")
    for gone in ("model", "adapter"):
        shutil.rmtree(tmp_path / "r" / gone)
    shutil.copytree(tmp_path / "whole/model", tmp_path / "r/model")  # it holds the tokenizer
    (tmp_path / "r/result.json").unlink()
    max((tmp_path / "r/checkpoints").glob("step-*")).unlink()
    shutil.rmtree(tmp_path / "base")
    found = result_of(compose("train", [f"run_dir={tmp_path / 'r'}"], RunConfig))
    assert found["resumed_from"] == [8]
    assert {key: found[key] for key in found.keys() - {*CLOCK}} == {key: whole[key] for key in whole.keys() - {*CLOCK}}
    for name in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "r" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


# --- PEFT


theirs_warns = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
PEFT = [
    ("LlamaForCausalLM", "tied", LLAMA),
    ("Qwen3ForCausalLM", "untied", {"ffn": "swiglu", "qk_norm": True, "lora_targets": ["q_proj", "v_proj"]}),
    ("ArceeForCausalLM", "tied_scaled", {"ffn": "relu2", "n_kv_heads": 2}),
    ("ApertusForCausalLM", "tied", {"ffn": "relu", "qk_norm": True, "lora_targets": ["down_proj"]}),
]


@theirs_warns
@each(("name", "head", "changes"), PEFT)
def test_peft_gives_the_same_logits_on_the_exported_base(
    name: str, head: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    from peft import AutoPeftModelForCausalLM

    net = adapted(head, **changes)
    base = Transformer(merged(net).config, net.head_config, vocab_size=257, seq_len=SEQ).eval()
    base.load_state_dict({key: value for key, value in net.state_dict().items() if not is_adapter(key)})
    assert export(base, byte_tokenizer(), tmp_path / "base") == name
    save_adapter(net, str(tmp_path / "base"), tmp_path / "adapter")
    theirs = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert furthest(logits_of(theirs), logits(net)) < 1e-5
    assert furthest(logits(base), logits(net)) > 0.01  # so the comparison would see a missing adapter
    assert (theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight) == (head == "tied")
    loaded = {key.replace(".default", "") for key in theirs.state_dict() if ".lora_" in key}
    assert loaded == load_file(tmp_path / "adapter/adapter_model.safetensors").keys()


def logits_of(theirs: Any) -> Tensor:
    with torch.no_grad():
        return theirs(torch.randint(257, (2, SEQ), generator=torch.Generator().manual_seed(0))).logits


@theirs_warns
def test_an_adapter_of_a_run_names_its_base(home: Path, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    export(*load_model(home / "base"), tmp_path / "base")
    run = composed(home, f"init_from={tmp_path / 'base'}", *LORA, f"run_dir={tmp_path / 'r'}", "optim.warmup_steps=0")
    train(run)
    theirs = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "r/adapter").eval()
    assert furthest(logits_of(theirs), logits(load_model(tmp_path / "r")[0])) < 1e-5


def test_without_adapters_of_that_form_a_line_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """GPT-2 stores q, k and v as one matrix, and there is no architecture without positions."""
    gpt2 = {"norm": "layernorm", "position": "learned", "ffn": "relu"}
    with caplog.at_level(logging.INFO, "lm"):
        for changes in (gpt2, {"position": "none"}):
            save_adapter(adapted(**changes), "base", tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
    assert ["GPT2LMHeadModel" in caplog.messages[0], "model.position=none" in caplog.messages[1]] == [True, True]


# --- settings


REFUSED = [
    *(("linear", changes) for changes in ({"lora_rank": 2}, {"lora_alpha": 2.0}, {"lora_targets": ["q_proj"]})),
    *(("lora", changes) for changes in ({"lora_rank": 0}, {"lora_alpha": 0.0}, {"lora_targets": []})),
    *(("lora", {"lora_targets": [name], "ffn": "relu"}) for name in ("head", "gate_proj")),
]


@each(("linear", "changes"), REFUSED)
def test_settings_are_refused_by_key(linear: str, changes: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=f"^model.{next(iter(changes))}="):
        ModelConfig(linear=linear, **changes)


def test_what_cannot_keep_the_base_is_refused(home: Path, tmp_path: Path) -> None:
    new = f"run_dir={tmp_path / 'new'}"
    with pytest.raises(BadInput, match=r"model\.linear=lora: trains adapters of a finished model; add init_from=RUN"):
        train(composed(home, *MODEL, *LORA, "tokenizer=byte", new))
    run = start(home, tmp_path / "new")
    untying = composed(home, "head=untied_midtraining").head
    for changes in ({"head": untying}, {"init_tied_matrix": "mean"}, {"diagnostics": DiagnosticsConfig(every=1)}):
        with pytest.raises(BadInput, match=r"with model\.linear=lora, the embedding and the head do not change"):
            replace(run, **changes)
    with pytest.raises(BadInput, match="precision=bf16-true: would round weights"):
        replace(run, trainer=replace(run.trainer, precision="bf16-true"))
    with pytest.raises(BadInput, match=r"model\.n_layers=2: init_from"):
        start(home, tmp_path / "new", "model.n_layers=2")
    assert not (tmp_path / "new").exists()


def test_an_ablation_of_adapters_needs_a_base() -> None:
    def run_of(words: list[str]) -> RunConfig:
        return compose("train", words, RunConfig)

    def base(**changes: Any) -> RunConfig | None:
        arms = {"full": [], "lora": ["model.linear=lora"]}
        config = AblationConfig(
            name="lora", seeds=[0], question="Is it?", arms=arms, baseline="full", equivalence_margin=0.01, **changes
        )
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return compose_base(config, [], compose_arms(config, [], run_of), run_of)

    assert base(base=["trainer.max_steps=8"]).model.linear == "linear"
    for key, changes in (("arms.lora", {}), ("base", {"base": ["model.linear=lora"]})):
        with pytest.raises(BadInput, match=rf"^ablation\.{key}: model\.linear=lora: .* add init_from=RUN"):
            base(**changes)
