"""LoRA: adapters alone train, model/ holds the merged model, and PEFT reads adapter/."""

import shutil
from copy import deepcopy

import pytest
import torch

from lm.cli.evaluate import EvaluateConfig
from lm.data.tokenizer import byte_tokenizer
from lm.folder import load_model
from lm.lab.formats.adapter import save_adapter
from lm.lab.formats.huggingface import export
from lm.lab.lora import LoRALinear
from lm.model.linear import is_adapter
from lm.model.transformer import Transformer
from lm.training.train import merged, train
from tests.helpers.models import assert_same_model, build, equal, random_tokens, weights
from tests.helpers.refusals import refused
from tests.helpers.runs import MODEL, RUN, composed, evaluate_run, outcome, result, stop
from tests.helpers.tiny import SEQ, tiny

LORA = ["model.linear=lora", "model.lora_rank=2"]
LLAMA = {"ffn": "swiglu", "bias": True}
TOKENS = random_tokens(2, SEQ)
each = pytest.mark.parametrize
peft_warns = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def start(text, base, run_dir, *words):
    return composed(*RUN, f"data.path={text}", f"init_from={base}", *LORA, f"run_dir={run_dir}", *words)


def adapted(head="tied", **changes):
    """A model whose adapters are not zero."""
    net = build(head, 257, linear="lora", lora_rank=3, lora_alpha=5.0, residual_scale=1.0, **changes).eval()
    noise = torch.Generator().manual_seed(1)
    for name, parameter in net.named_parameters():
        if is_adapter(name):
            parameter.data.copy_(torch.randn(parameter.shape, generator=noise) * 0.1)
    return net


def without_adapters(tensors):
    return {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}


def test_a_model_begins_as_one_without_adapters():
    """With equal weights bit for bit; neither their scale nor B at zero changes the initial A."""
    plain, net = (build("tied", 257, linear=linear, **LLAMA) for linear in ("linear", "lora"))
    tensors = net.state_dict()
    assert equal(without_adapters(tensors), plain.state_dict())
    for name, tensor in tensors.items():
        if is_adapter(name):
            bound = tensor.shape[1] ** -0.5 if ".lora_A." in name else 0
            assert 0.9 * bound <= tensor.abs().max() <= bound
    assert torch.equal(net(TOKENS), plain(TOKENS))


@each(("head", "targets"), [("tied", ["q_proj", "down_proj"]), ("untied", None)])
def test_merging_changes_no_logits_and_leaves_a_tied_matrix_one(head, targets):
    net = adapted(head, **LLAMA, lora_targets=targets)
    layers = {name: module for name, module in net.named_modules() if isinstance(module, LoRALinear)}
    assert {name.rpartition(".")[2] for name in layers} == {*(targets or net.config.adapted)}
    whole, before = merged(net), deepcopy(net.state_dict())
    assert whole.config == tiny(**LLAMA, residual_scale=1.0)
    moved = {name for name, tensor in whole.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {f"{name}.weight" for name in layers}
    assert_same_model(whole, net)
    assert (whole.head.matrix(whole.embed.weight) is whole.embed.weight) == (head == "tied")
    assert merged(whole) is whole


@peft_warns
@each(
    ("name", "head", "changes"),
    [
        ("Qwen3ForCausalLM", "untied", {"ffn": "swiglu", "qk_norm": True, "lora_targets": ["q_proj", "v_proj"]}),
        ("ArceeForCausalLM", "tied_scaled", {"ffn": "relu2", "n_kv_heads": 2, "lora_targets": ["down_proj"]}),
    ],
)
def test_peft_gives_the_same_logits(name, head, changes, tmp_path):
    from peft import AutoPeftModelForCausalLM

    net = adapted(head, **changes)
    base = merged(net)
    base.load_state_dict(without_adapters(net.state_dict()))
    assert not torch.allclose(base(TOKENS), net(TOKENS), atol=0.01), "the adapters matter"
    assert export(base, byte_tokenizer(), tmp_path / "base") == name
    save_adapter(net, str(tmp_path / "base"), tmp_path / "adapter")
    peft = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert_same_model(net, lambda tokens: peft(tokens).logits)


@pytest.mark.slow
@peft_warns
def test_adapters_alone_train_model_is_merged_and_peft_finds_the_base(finished_run, text_file, tmp_path):
    """So the model is scored as any other, and the matrices of the base, a folder of transformers, stay bit for bit."""
    from peft import AutoPeftModelForCausalLM

    export(*load_model(finished_run), tmp_path / "base")
    words = ["optim=muon", "optim.weight_decay=0.5", "optim.warmup_steps=0", "optim.lr_scale=0.1"]
    run = start(text_file, tmp_path / "base", tmp_path / "r", *words)
    _, result = train(run)
    after = torch.load(max((tmp_path / "r/checkpoints").glob("step-*")), weights_only=True)["net"]
    assert equal(without_adapters(after), weights(finished_run))
    fresh = Transformer(run.model, run.head, vocab_size=257, seq_len=32, seed=run.seed).state_dict()
    assert not any(torch.equal(after[name], fresh[name]) for name in after if is_adapter(name))
    assert result["val_loss"] < result["init_from"]["val_loss"]
    n_adapters = sum(tensor.numel() for name, tensor in after.items() if is_adapter(name))
    assert (result["n_params_trained"], result["n_params_by_role"]["adapter"]) == (n_adapters, n_adapters)
    net, _ = load_model(tmp_path / "r")
    assert net.config == load_model(tmp_path / "base")[0].config
    assert evaluate_run(EvaluateConfig(run_dir=str(tmp_path / "r"), threads=1))["loss"] == result["val_loss"]
    peft = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "r/adapter").eval()
    assert_same_model(net, lambda tokens: peft(tokens).logits)
    assert peft.get_output_embeddings().weight is peft.get_input_embeddings().weight


@pytest.mark.slow
def test_a_resume_needs_no_base_and_ends_the_same(finished_run, text_file, tmp_path):
    """A start does."""
    base, run_dir = tmp_path / "base", tmp_path / "r"
    with refused(r"model\.linear=lora"):
        train(start(text_file, "null", run_dir, *MODEL, "tokenizer=byte"))
    assert not run_dir.exists()
    shutil.copytree(finished_run, base)
    whole = start(text_file, base, tmp_path / "whole")
    train(whole)
    run = start(text_file, base, run_dir)
    stop(run, 8)
    shutil.rmtree(base)
    train(composed(f"run_dir={run_dir}"))
    assert result(run_dir)["resumed_from"] == [8]
    assert outcome(run) == outcome(whole)
    name = "adapter/adapter_model.safetensors"
    assert (run_dir / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
