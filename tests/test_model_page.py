"""A model as a page: in JavaScript it has our tokens of a text and our logits, and it writes our text."""

import json
import random
import shutil
import subprocess
from itertools import islice
from pathlib import Path

import pytest
import torch
from conftest import tiny
from helpers.browser import browser_page
from helpers.models import MODELS, assert_same_model, exported, noisy
from tokenizers import Tokenizer as Backend

from lm import generate, load_model
from lm.data.tokenizer import Tokenizer, byte_tokenizer, char_tokenizer, train_bpe
from lm.decoding import decode
from lm.lab.formats.page import export_page

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="needs node")
BPE = train_bpe([Path(__file__).read_text()], 300)
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
    changes = dict(case)
    head = changes.pop("kind")
    net = noisy(tiny(**changes), head, BPE.vocab_size)
    page = export_page(net, BPE, tmp_path, "f32")
    assert_same_model(net, lambda tokens: torch.tensor(in_javascript(page, rows=tokens.tolist())["logits"]))


@needs_node
@pytest.mark.parametrize("changes", [{"position": "learned"}, {"rope_theta": 100.0, "d_head": 6}, {"position": "none"}])
def test_decoding_past_the_context_is_ours(changes, tmp_path):
    """Each greedy token, and the five best with the logits that decided it."""
    net, prompt = noisy(tiny(**changes), "tied_scaled", BPE.vocab_size), [0, *range(5, 15)]
    logits = []
    tokens = [token for (token,) in islice(decode(net, [prompt], observe=lambda x: logits.append(x[0])), 32)]
    page = export_page(net, BPE, tmp_path, "f32")
    (steps,) = in_javascript(page, prompts=[prompt], n_tokens=32)["steps"]
    assert [token for token, _ in steps] == tokens
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
    page = export_page(noisy(tiny(), "tied", tokenizer.vocab_size), tokenizer, tmp_path)
    in_page = in_javascript(page, texts)
    assert in_page["ids"] == tokenizer.encode_all(texts)
    assert in_page["texts"] == texts


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
        assert refused == []
