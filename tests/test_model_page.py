"""A model as a page: in JavaScript it has our tokens of a text and our logits, and it writes our text."""

import json
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_RUN, Outcome, tiny
from helpers.browser import browser_page
from helpers.models import MODELS, name_of, noisy
from helpers.runs import composed
from tokenizers import Tokenizer as Backend

from lm import generate, load_model
from lm.data.tokenizer import Tokenizer, byte_tokenizer, char_tokenizer, train_bpe
from lm.decoding import decode
from lm.lab.formats.page import export_page
from lm.model.transformer import Transformer
from lm.training.train import train

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
    {"kind": "tied_scaled", "document_separator": 7, "position": "learned"},
    {"kind": "tied", "document_separator": 7, "rope_theta": 100.0, "norm_eps": 1e-2, "d_head": 6},
    {"kind": "untied", "rope_scaling": [8.0, 1.0, 4.0, 32.0], "n_kv_heads": 2, "attention_bias": "qkv"},
    {"kind": "tied", "vocab_rows": 310, "ffn": "swiglu", "attention_bias": True},
]


def in_javascript(page: Path, texts: Sequence[str] = (), prompts: Sequence[list[int]] = (), n_tokens: int = 64) -> Any:
    request = json.dumps({"texts": texts, "prompts": prompts, "n_tokens": n_tokens})
    script = Path(__file__).parent / "helpers/model_page.js"
    done = subprocess.run([str(NODE), script, page], input=request, text=True, capture_output=True, check=True)
    return json.loads(done.stdout)


def steps(net: Transformer, prompt: list[int], n_tokens: int = 64) -> Iterator[tuple[int, torch.Tensor]]:
    """Each greedy token, with the logits (V,) that decided it."""
    logits: list[torch.Tensor] = []
    for (token,) in islice(decode(net, [prompt], observe=lambda x: logits.append(x[0])), n_tokens):
        yield token, logits[-1]


@needs_node
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_logits_and_the_tokens_are_ours(case: dict[str, Any], tmp_path: Path) -> None:
    changes = dict(case)
    head, separator = changes.pop("kind"), changes.pop("document_separator", None)
    net = noisy(tiny(**changes), head, BPE.vocab_size)
    net.document_separator = separator
    prompt = [0, *range(5, 15)]
    page = export_page(net, BPE, tmp_path, "f32")
    (in_page,) = in_javascript(page, prompts=[prompt])["steps"]
    assert len(in_page) == 64
    for (token, logits), (page_token, candidates) in zip(steps(net, prompt), in_page, strict=True):
        ids, values = zip(*candidates, strict=True)
        assert page_token == ids[0] == token
        expected = logits.topk(5)
        torch.testing.assert_close(torch.tensor(values), expected.values, rtol=0, atol=1e-4)
        assert list(ids) == expected.indices.tolist()


@needs_node
@pytest.mark.parametrize("tokenizer", [BPE, byte_tokenizer(), char_tokenizer(AWKWARD)], ids=["bpe", "byte", "char"])
def test_a_text_has_our_tokens_and_comes_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    draw = random.Random(0)
    texts = AWKWARD + ["".join(draw.choices("".join(AWKWARD[:-2]), k=40)) for _ in range(200)]
    page = export_page(noisy(tiny(), "tied", tokenizer.vocab_size), tokenizer, tmp_path)
    in_page = in_javascript(page, texts)
    assert in_page["ids"] == tokenizer.encode_all(texts)
    assert in_page["texts"] == texts


@needs_node
def test_merges_that_make_one_token_in_two_ways_are_applied_in_order(tmp_path: Path) -> None:
    """A merge may make a pair that comes before it in the list: the pair is then merged at once."""
    layout = json.loads(byte_tokenizer().to_json())
    vocab = layout["model"]["vocab"]
    for word in ("bc", "abc", "abcab", "ab"):
        vocab[word] = len(vocab)
    layout["model"]["merges"] = [["a", "bc"], ["abc", "ab"], ["a", "b"], ["ab", "c"], ["b", "c"]]
    tokenizer = Tokenizer(Backend.from_str(json.dumps(layout)))
    texts = ["abcabcabcab", "abcbcab"]
    page = export_page(noisy(tiny(), "tied", tokenizer.vocab_size), tokenizer, tmp_path)
    assert in_javascript(page, texts)["ids"] == tokenizer.encode_all(texts)


@pytest.fixture(scope="module")
def run_dir(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = (f"data.path={text_file}", f"run_dir={tmp_path_factory.mktemp('page')}/run", "trainer.max_steps=200")
    return train(composed(*TINY_RUN, *words, "checkpoint.every=200", "tokenizer=bpe", "tokenizer.vocab_size=300"))[0]


@pytest.mark.slow
def test_a_browser_opens_the_page_and_generates(
    run_dir: Path, text_file: Path, command: Callable[..., Outcome], tmp_path: Path
) -> None:
    words = (f"run_dir={run_dir}", f"output_dir={tmp_path}/out", "title=Mine <b>", "format=page", "dtype=f32")
    code, out, err = command("export", *words)
    assert (code, err, out.split(":")[0]) == (0, "", f"{tmp_path}/out/model.html")
    prompt = "def <b>f</b>(x"
    expected = prompt + generate(*load_model(run_dir), prompt, 40)
    with browser_page(390) as page:
        page.context.set_offline(True)
        refused: list[str] = []
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
        page.hover(".token >> nth=7")
        assert "token 8," in page.inner_text("#step p")
        page.focus(".token[tabindex='0']")
        for key in ("ArrowRight", "Enter", "ArrowDown", "Enter"):
            page.keyboard.press(key)
        page.wait_for_selector(".token.picked.chosen")
        page.locator("#status", has_text="tokens, ").wait_for()
        tokens = page.locator(".token").all_inner_texts()
        index = page.locator(".token").evaluate_all("all => all.findIndex((token) => token.matches('.picked'))")
        assert len(tokens) == index + 41
        assert "".join(tokens[:index]) == expected[len(prompt) :][: len("".join(tokens[:index]))]
        page.click("#back")
        page.wait_for_selector("#back", state="hidden")
        page.locator("#status", has_text="40 tokens, ").wait_for()
        assert page.text_content("#output") == expected
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.fill("#max_new_tokens", "100000")
        page.click("#generate")
        page.click("#stop")
        page.wait_for_selector("#stop", state="hidden")
        assert page.locator(".token").count() < 100_000
        assert refused == []
