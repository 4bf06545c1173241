"""LoRA: adapters alone train, model/ holds the merged model, and PEFT reads adapter/."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HEADS, SEQ, TEXT, tiny
from torch import Tensor

from lm.cli.evaluate import EvaluateConfig
from lm.config import ModelConfig, RunConfig
from lm.data.tokenizer import byte_tokenizer
from lm.errors import UserError
from lm.folder import load_model
from lm.lab.formats.adapter import save_adapter
from lm.lab.formats.huggingface import export
from lm.lab.lora import LoRALinear, merged
from lm.model.linear import is_adapter
from lm.model.size import n_params, n_params_trained
from lm.model.transformer import Transformer
from lm.training.train import train
from tests.helpers.models import weights
from tests.helpers.runs import CLOCK, MODEL, at_home, composed
from tests.helpers.scores import evaluate_run

LORA = ["model.linear=lora", "model.lora_rank=2"]
LLAMA = {"ffn": "swiglu", "bias": True}
TOKENS = torch.randint(257, (2, SEQ), generator=torch.Generator().manual_seed(0))
each = pytest.mark.parametrize
peft_warns = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and a finished run on it."""
    home = tmp_path_factory.mktemp("home")
    (home / "text").write_text(TEXT)
    train(at_home(home, *MODEL, "tokenizer=byte", f"run_dir={home / 'base'}"))
    return home


def start(home: Path, run_dir: Path, *words: str, base: Path | None = None) -> RunConfig:
    return at_home(home, f"init_from={base or home / 'base'}", *LORA, f"run_dir={run_dir}", *words)


def build(config: ModelConfig, head: str = "tied") -> Transformer:
    return Transformer(config, HEADS[head], vocab_size=257, seq_len=SEQ).eval()


def adapted(head: str = "tied", **changes: Any) -> Transformer:
    """A model whose adapters are not zero."""
    net = build(tiny(**{"linear": "lora", "lora_rank": 3, "lora_alpha": 5.0, "residual_scale": 1.0} | changes), head)
    noise = torch.Generator().manual_seed(1)
    for name, parameter in net.named_parameters():
        if is_adapter(name):
            parameter.data.copy_(torch.randn(parameter.shape, generator=noise) * 0.1)
    return net


@torch.no_grad()
def logits(net: Any) -> Tensor:
    output = net(TOKENS)
    return output if isinstance(output, Tensor) else output.logits


def gap(first: Any, second: Any) -> float:
    """The largest difference of the logits of two models as a fraction of the largest logit."""
    return float((logits(first) - logits(second)).abs().max() / logits(second).abs().max())


def test_a_model_begins_as_one_without_adapters() -> None:
    """With equal weights bit for bit; neither their scale nor B at zero changes the initial A."""
    config = tiny(**LLAMA)
    plain, net = build(config), build(replace(config, linear="lora"))
    initial, tensors = plain.state_dict(), net.state_dict()
    assert {name for name in tensors if not is_adapter(name)} == initial.keys()
    assert all(torch.equal(tensors[name], initial[name]) for name in initial)
    for name, tensor in tensors.items():
        if ".lora_A." in name:
            bound = tensor.shape[1] ** -0.5
            assert 0.9 * bound < tensor.abs().max() <= bound
        assert ".lora_B." not in name or not tensor.any()
    assert torch.equal(logits(net), logits(plain))


@each(("head", "targets"), [("tied", ["q_proj", "down_proj"]), ("untied", None)])
def test_merging_changes_no_logits_and_leaves_a_tied_matrix_one(head: str, targets: list[str] | None) -> None:
    net = adapted(head, **LLAMA, lora_targets=targets)
    layers = {name: module for name, module in net.named_modules() if isinstance(module, LoRALinear)}
    assert {name.rpartition(".")[2] for name in layers} == {*(targets or net.config.adapted)}
    assert all(layer.scale == 5 / 3 and layer.lora_A.weight.shape[0] == 3 for layer in layers.values())
    n_trained = sum(3 * (layer.in_features + layer.out_features) for layer in layers.values())
    whole, before = merged(net), {name: tensor.clone() for name, tensor in net.state_dict().items()}
    assert (n_params_trained(net), n_params(net)) == (n_trained, n_params(whole) + n_trained)
    assert whole.config == tiny(**LLAMA, residual_scale=1.0)
    assert gap(whole, net) < 1e-5
    moved = {name for name, tensor in whole.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {f"{name}.weight" for name in layers}
    assert (whole.head.matrix(whole.embed.weight) is whole.embed.weight) == (head == "tied")
    assert merged(whole) is whole


@pytest.mark.slow
@each(("optim", "head"), [("adamw", "untied_from_embedding"), ("muon", "tied")])
def test_adapters_alone_train_and_model_is_merged(home: Path, tmp_path: Path, optim: str, head: str) -> None:
    """So the model is scored as any other, and the base's matrices are in it bit for bit."""
    words = [f"optim={optim}", f"head={head}", "optim.weight_decay=0.5", "optim.warmup_steps=0"]
    run = start(home, tmp_path / "r", *words)
    _, result = train(run)
    after = torch.load(max((tmp_path / "r/checkpoints").glob("step-*")), weights_only=True)["net"]
    base = weights(home / "base")
    if head != "tied":
        base["head.proj.weight"] = base["embed.weight"]
    assert {name for name in after if not is_adapter(name)} == base.keys() == weights(tmp_path / "r").keys()
    assert all(torch.equal(after[name], base[name]) for name in base)
    fresh = Transformer(run.model, run.head, vocab_size=257, seq_len=32, seed=run.seed).state_dict()
    assert not any(torch.equal(after[name], fresh[name]) for name in after if is_adapter(name))
    assert result["val_loss"] < result["init_from"]["val_loss"]
    n_adapters = sum(tensor.numel() for name, tensor in after.items() if is_adapter(name))
    assert (result["n_params_trained"], result["n_params_by_role"]["adapter"]) == (n_adapters, n_adapters)
    assert load_model(tmp_path / "r")[0].config == load_model(home / "base")[0].config
    assert evaluate_run(EvaluateConfig(run_dir=str(tmp_path / "r"), threads=1))["loss"] == result["val_loss"]


@pytest.mark.slow
def test_a_resume_needs_no_base_and_ends_the_same(home: Path, tmp_path: Path) -> None:
    """A start does."""
    with pytest.raises(UserError, match=r"model\.linear=lora"):
        train(start(home, tmp_path / "r", "init_from=null", *MODEL, "tokenizer=byte"))
    assert not (tmp_path / "r").exists()
    base, run_dir = tmp_path / "base", tmp_path / "r"
    shutil.copytree(home / "base", base)
    _, whole = train(start(home, tmp_path / "whole", base=base))
    shutil.copytree(tmp_path / "whole", run_dir)
    (run_dir / "result.json").unlink()
    max((run_dir / "checkpoints").glob("step-*")).unlink()
    for folder in (run_dir / "adapter", base):
        shutil.rmtree(folder)
    _, again = train(composed(f"run_dir={run_dir}"))
    assert again["resumed_from"] == [8]
    assert again | {key: whole[key] for key in CLOCK if key in whole} == whole
    for name in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (run_dir / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@peft_warns
@each(
    ("name", "head", "changes"),
    [
        ("Qwen3ForCausalLM", "untied", {"ffn": "swiglu", "qk_norm": True, "lora_targets": ["q_proj", "v_proj"]}),
        ("ArceeForCausalLM", "tied_scaled", {"ffn": "relu2", "n_kv_heads": 2, "lora_targets": ["down_proj"]}),
    ],
)
def test_peft_gives_the_same_logits(name: str, head: str, changes: dict[str, Any], tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    net = adapted(head, **changes)
    base = build(merged(net).config, head)
    base.load_state_dict({key: value for key, value in net.state_dict().items() if not is_adapter(key)})
    assert export(base, byte_tokenizer(), tmp_path / "base") == name
    save_adapter(net, str(tmp_path / "base"), tmp_path / "adapter")
    peft = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert gap(peft, net) < 1e-5
    assert gap(base, net) > 0.01  # so the comparison would see a missing adapter


@pytest.mark.slow
@peft_warns
def test_an_adapter_of_a_run_names_its_base(home: Path, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    export(*load_model(home / "base"), tmp_path / "base")
    train(start(home, tmp_path / "r", "optim.warmup_steps=0", base=tmp_path / "base"))
    peft = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "r/adapter").eval()
    assert gap(peft, load_model(tmp_path / "r")[0]) < 1e-5
    assert peft.get_output_embeddings().weight is peft.get_input_embeddings().weight
