"""What save_model writes and load_model refuses, what no export can carry, the card of an export, a model as a page."""

import json
import random
import re
import shlex
import shutil
import subprocess
from copy import deepcopy
from pathlib import Path

import pytest
import tokenizers
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers

from lm import generate
from lm.config import config_hash
from lm.data.tokenizer import Tokenizer, byte_tokenizer, char_tokenizer, train_bpe
from lm.folder import load_model, model_folder, save_model
from lm.lab.commands.export import run as export_command
from lm.lab.formats.gguf import export_gguf
from lm.lab.formats.huggingface import export
from lm.lab.formats.page import export_page
from lm.system.files import read_json
from tests.helpers.browser import browser_page
from tests.helpers.decoding import tokens
from tests.helpers.models import GPT2, LLAMA, MODELS, QWEN3, assert_same_model, build, equal, exported, noisy
from tests.helpers.refusals import refused
from tests.helpers.runs import composed, data_of
from tests.helpers.tiny import HEADS, SEQ, TEXT

BYTE = byte_tokenizer()
BPE = train_bpe([TEXT], 300)
TOKENS = torch.arange(SEQ)[None]
FILES = ("model.safetensors", "tokenizer.json", "config.json")


@pytest.fixture
def folder(tmp_path):
    save_model(noisy("untied", 257), BYTE, tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize("head", HEADS)
def test_round_trip(head, tmp_path):
    net = noisy(head, 300, n_kv_heads=1, qk_norm=True, attention_bias="qkv")
    save_model(net, BPE, tmp_path / "model")
    again, tokenizer = load_model(tmp_path)
    assert (again.config, again.head_config) == (net.config, net.head_config)
    assert torch.equal(again(TOKENS), net(TOKENS))
    assert tokenizer.to_json() == BPE.to_json()


def test_a_head_saved_before_untying_is_what_was_trained(tmp_path):
    """While it is tied its own matrix is out of date, so the folder holds the embedding twice. `net` is not changed."""
    net = noisy("untied_midtraining", 257)
    net.head.on_train_step(0.0, net.embed.weight, {})
    before, logits = deepcopy(net.state_dict()), net(TOKENS)
    save_model(net, BYTE, tmp_path / "model")
    assert torch.equal(load_model(tmp_path)[0](TOKENS), logits)
    weights = load_file(tmp_path / "model/model.safetensors")
    assert torch.equal(weights["head.proj.weight"], weights["embed.weight"])
    assert equal(net.state_dict(), before)


def with_setting(**changes):
    return lambda content: json.dumps(json.loads(content) | changes).encode()


@pytest.mark.parametrize(
    ("name", "damage", "named"),
    [
        *((name, lambda content: content.replace(b"1", b"2"), name) for name in FILES),
        *((name, None, name) for name in FILES[:2]),
        ("config.json", None, "model"),
        ("config.json", with_setting(format=99), "format"),
        ("config.json", with_setting(sha256={"/dev/zero": "x"}), "sha256"),
        ("config.json", with_setting(seq_len=0), "seq_len=0"),
        ("config.json", with_setting(vocab_size=10**12), "embed.weight"),
        ("config.json", with_setting(model={"n_layers": 1}), "model.safetensors"),
    ],
)
def test_a_changed_or_missing_file_is_one_line_that_names_it(name, damage, named, folder):
    path = folder / "model" / name
    content = path.read_bytes()
    path.unlink()
    if damage:
        path.write_bytes(damage(content))
    with refused(f"^.*{folder}.*{named}.*$"):
        load_model(folder)


def test_a_folder_of_runs_is_answered_by_the_key_that_was_typed(tmp_path):
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/model/config.json").touch()
    with refused(r"^init_from=.*did you mean init_from=.*/run\?"):
        model_folder(tmp_path, "init_from")


# --- what a format cannot carry


def changed(added=(), **parts):
    backend = tokenizers.Tokenizer.from_str(BPE.to_json())
    backend.add_tokens([*added])
    for name, part in parts.items():
        setattr(backend, name, part)
    return Tokenizer(backend)


UNCARRIED = [  # how a model is written, its settings, its tokenizer, and what is named
    (export, LLAMA | {"position": "none"}, BYTE, "model.position=none"),
    (export, GPT2 | {"ffn": "gelu", "d_head": 6}, BYTE, "model.d_head=6"),
    (export, LLAMA | {"linear": "torch.nn.Linear"}, BYTE, "model.linear=torch.nn.Linear"),
    (export_gguf, LLAMA | {"ffn": "relu2"}, BPE, "format=gguf: model.ffn=relu2"),
    (export_gguf, QWEN3 | {"rope_scaling": [8.0, 1.0, 4.0, 32.0]}, BPE, "format=gguf: model.rope_scaling=[8.0, 1.0,"),
    (export_gguf, LLAMA, BYTE, "format=gguf: this tokenizer"),
    (export_gguf, LLAMA, changed(added=["<t>"]), "format=gguf: this tokenizer"),
    (export_page, {"norm": "torch.nn.LayerNorm"}, BPE, "format=page: model.norm=torch.nn.LayerNorm"),
    (export_page, {}, changed(normalizer=normalizers.NFC()), "format=page: the page has no such tokenizer"),
]


@pytest.mark.parametrize(("write", "changes", "tokenizer", "named"), UNCARRIED)
def test_what_a_format_cannot_carry_is_refused_by_name(write, changes, tokenizer, named, tmp_path):
    net = build("tied", tokenizer.vocab_size, **changes)
    with refused(f"^{re.escape(named)}"):
        write(net, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("write", "dtype"), [(export_gguf, "f16"), (export_gguf, "q8_0"), (export_page, "f16")])
def test_a_weight_that_becomes_infinite_is_refused(write, dtype, tmp_path):
    net = noisy("tied", BPE.vocab_size, **LLAMA)
    net.embed.weight.data[5, 3] = 1e7
    with refused(f"^dtype={dtype}: "):
        write(net, BPE, tmp_path / "out", dtype)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["safetensors", "gguf", "page"])
def test_a_model_that_diverged_is_not_exported(form, command, tmp_path):
    net = noisy("tied", BPE.vocab_size, **LLAMA)
    net.norm.weight.data[3] = torch.nan
    save_model(net, BPE, tmp_path / "model")
    code, _, err = command("export", f"run_dir={tmp_path}/model", f"output_dir={tmp_path}/out", f"format={form}")
    assert (code, (tmp_path / "out").exists()) == (2, False)
    assert "norm.weight: has numbers that are not finite" in err


# --- the card, read back by huggingface_hub, and its example, which runs


def card(run_dir, output_dir):
    export_command([f"run_dir={run_dir}", f"output_dir={output_dir}"])
    return Path(output_dir, "README.md").read_text()


def hash_by_words(text):
    """The hash of the run that the words of a card give to train."""
    (words,) = re.findall(r"^```bash\nlm-lab train (.*?)\n```", text, re.DOTALL | re.MULTILINE)
    run = composed(*shlex.split(words.replace("\\\n", " ")))
    data = data_of(run)
    return config_hash(run, data.hash, data.tokenizer.hash)


def test_the_card_of_a_run(finished_run, text_file, tmp_path, monkeypatch, capsys):
    """Of a run on a text whose name is Markdown and HTML; of what has no result or no settings it says less."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished_run, "run")
    shutil.copy(text_file, "a_*text*<b>|.txt")
    config = Path("run/config.yaml")
    config.write_text(config.read_text().replace("text.txt", "a_*text*<b>|.txt"))
    result = read_json(Path("run/result.json")) | {"samples": [{"prompt": "\"'\nabc"}]}
    Path("run/result.json").write_text(json.dumps(result))
    text = card("run", "out")
    data = ModelCard(text).data
    assert (data.library_name, data.pipeline_tag, data.license) == ("transformers", "text-generation", None)
    assert f"{result['val_bpb']:.4f} bits per byte, {result['val_loss']:.4f} nats per token" in text
    assert f"{result['n_params']:,} parameters" in text
    assert hash_by_words(text) == result["config_hash"]
    assert str(text_file.parent) not in text, "the folders of this machine are nobody's business"
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    capsys.readouterr()
    exec(example, {})
    assert capsys.readouterr().out.startswith("\"'\na")

    Path("run/result.json").unlink()
    config.write_text(config.read_text().replace(" separator: null", ' separator: "\\n\\n"'))
    unfinished = card("run", "unfinished")
    assert " model.d_model=32 " in unfinished
    assert " 'data.separator=\n\n' " in unfinished
    assert "training was stopped" in unfinished
    assert "bits per byte" not in unfinished
    config.unlink()
    assert "model.d_model=32" not in card("run", "bare")


# --- a model as a page: in JavaScript it has our tokens of a text and our logits, and it writes our text

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="needs node")
AWKWARD = [
    *("", " ", "   a", "a  b ", "\n\n\tdef f(x):\n        return x\n", "\r\n \r", "a\x00b\x1f", "a" * 3000),
    *("it's we'll I'D 'tis", "1,234 x9\u0663\u00b2", "na\u00efve e\u0301 \u65e5\u672c\u8a9e", "\ufeffa\ufeff b"),
    *("a\u0085 b\u00a0c\u2028\u3000d", "\U0001f642\u200d\U0001f467", "<|endoftext|>", "</script><!--<b>&amp;"),
]
CASES = [
    *MODELS[:7],  # which have every choice of every part
    *({"kind": head, **changes} for _, head, changes in exported("page")),
]


def in_javascript(page, texts=(), rows=(), prompts=(), n_tokens=0):
    request = json.dumps({"texts": texts, "rows": rows, "prompts": prompts, "n_tokens": n_tokens})
    script = Path(__file__).parent / "helpers/model_page.js"
    done = subprocess.run([str(NODE), script, page], input=request, text=True, capture_output=True, check=True)
    return json.loads(done.stdout)


@needs_node
@pytest.mark.parametrize("case", CASES)
def test_the_logits_are_ours(case, tmp_path):
    net = noisy(vocab_size=BPE.vocab_size, **case)
    page = export_page(net, BPE, tmp_path, "f32")
    assert_same_model(net, lambda tokens: torch.tensor(in_javascript(page, rows=tokens.tolist())["logits"]))


@needs_node
@pytest.mark.parametrize("changes", [{"position": "learned"}, {"rope_theta": 100.0, "d_head": 6}, {"position": "none"}])
def test_decoding_past_the_context_is_ours(changes, tmp_path):
    """Each greedy token, and the five best with the logits that decided it."""
    net, prompt = noisy("tied_scaled", BPE.vocab_size, **changes), [0, *range(5, 15)]
    logits = []
    (expected,) = tokens(net, [prompt], 32, observe=lambda x: logits.append(x[0]))
    page = export_page(net, BPE, tmp_path, "f32")
    (steps,) = in_javascript(page, prompts=[prompt], n_tokens=32)["steps"]
    assert [token for token, _ in steps] == expected
    best = torch.stack(logits).topk(5)
    shown = torch.tensor([candidates for _, candidates in steps])  # (steps, 5, 2)
    assert torch.equal(shown[..., 0].long(), best.indices)
    torch.testing.assert_close(shown[..., 1], best.values, rtol=0, atol=1e-4)


def with_crossing_merges():
    """A merge may make a pair that comes before it in the list: the pair is then merged at once."""
    layout = json.loads(byte_tokenizer().to_json())
    vocab = layout["model"]["vocab"]
    for word in ("bc", "abc", "abcab", "ab"):
        vocab[word] = len(vocab)
    layout["model"]["merges"] = [["a", "bc"], ["abc", "ab"], ["a", "b"], ["ab", "c"], ["b", "c"]]
    return Tokenizer(Backend.from_str(json.dumps(layout)))


@needs_node
@pytest.mark.parametrize("tokenizer", [BPE, byte_tokenizer(), with_crossing_merges(), char_tokenizer(AWKWARD)])
def test_a_text_has_our_tokens_and_comes_back(tokenizer, tmp_path):
    draw = random.Random(0)
    texts = [*AWKWARD, "abcabcabcab", "abcbcab"]
    texts += ["".join(draw.choices("".join(AWKWARD[:-2]), k=40)) for _ in range(200)]
    page = export_page(noisy("tied", tokenizer.vocab_size), tokenizer, tmp_path)
    in_page = in_javascript(page, texts)
    assert in_page["ids"] == tokenizer.encode_all(texts)
    assert in_page["texts"] == texts


def test_the_prompt_of_a_page_has_its_own_characters(tmp_path):
    page = export_page(noisy("tied", BPE.vocab_size), BPE, tmp_path, prompt="<b>\x1b\u2028</textarea>")
    assert "&lt;b&gt;\x1b\u2028&lt;/textarea&gt;</textarea>" in page.read_text()


@pytest.mark.slow
def test_a_browser_opens_the_page_and_generates(finished_run, text_file, command, tmp_path):
    words = (f"run_dir={finished_run}", f"output_dir={tmp_path}/out", "title=Mine <b>", "format=page", "dtype=f32")
    code, out, err = command("export", *words)
    assert (code, err, out.split(":")[0]) == (0, "", f"{tmp_path}/out/model.html")
    prompt = "def <b>f</b>(x"
    expected = prompt + generate(*load_model(finished_run), prompt, 40)
    with browser_page() as page:
        page.context.set_offline(True)
        refused = []
        page.on("console", lambda message: refused.append(message.text))
        page.goto((tmp_path / "out/model.html").as_uri())
        page.locator("#status", has_text="128 tokens, ").wait_for()  # a line of the validation text is continued
        assert page.input_value("#prompt") in text_file.read_text()
        assert (page.inner_text("h1"), page.input_value("#temperature")) == ("Mine <b>", "0.8")
        assert page.locator("#step .bar").count() >= 5  # of the first token that is uncertain
        page.fill("#max_new_tokens", "40")
        page.fill("#prompt", prompt)
        page.fill("#temperature", "0")
        page.click("#generate")
        page.locator("#status", has_text="40 tokens, ").wait_for()
        assert page.text_content("#output") == expected
        assert page.locator("#output b").count() == 0
        page.focus(".token[tabindex='0']")
        for key in ("ArrowRight", "Enter", "ArrowDown", "Enter"):
            page.keyboard.press(key)
        page.locator("#status", has_text="40 tokens, ").wait_for()
        typed = page.input_value("#prompt")
        assert typed[:-1] == expected[: len(typed) - 1] != prompt
        assert typed != expected[: len(typed)], "the second candidate is another one"
        assert page.text_content("#output") == typed + generate(*load_model(finished_run), typed, 40)
        page.click("#back")
        page.wait_for_selector("#back", state="hidden")
        page.locator("#status", has_text="40 tokens, ").wait_for()
        assert page.text_content("#output") == expected
        ids = [*map(load_model(finished_run)[1].backend.token_to_id, ("A", "ã", "<|endoftext|>"))]
        settings = "readTokenizer(JSON.parse($('settings').textContent).tokenizer)"
        labels = page.evaluate(f"{ids}.map((id) => named({settings}, id).label)")
        assert labels == ["A", "<e3>", "<|endoftext|>"], "the first byte of a character is told from others"
        assert refused == []
