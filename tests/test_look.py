"""The page that looks at runs: what its views compute, what its server refuses, and the page in a browser."""

import http.client
import json
import math
import re
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lm import generate
from lm.data.tokenizer import byte_tokenizer, char_tokenizer
from lm.decoding import GREEDY, window_start
from lm.folder import RUN_MARKS, folders_with
from lm.lab.formats.huggingface import export
from lm.lab.look.runs import LoadedModel, described_run
from lm.lab.look.server import LookServer
from lm.lab.look.views import attention, attention_weights, continuations, scored_text
from lm.training.train import train
from tests.helpers.ablation_folder import write_run_dir
from tests.helpers.browser import browser_page
from tests.helpers.decoding import sensitive
from tests.helpers.refusals import refused
from tests.helpers.runs import composed
from tests.helpers.tiny import TEXT, TINY_RUN

BYTE, CHAR = byte_tokenizer(), char_tokenizer([TEXT])
PROMPT = "def f1(x"
slow = pytest.mark.slow


def loaded(name, tokenizer=BYTE, **changes):
    """A model whose next token depends on its whole context, and whose run is nowhere."""
    return LoadedModel(name, Path("absent"), sensitive(tokenizer.vocab_size, **changes), tokenizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three finished runs, one of them with another tokenizer, and one that is not finished."""
    top = tmp_path_factory.mktemp("look")
    (top / "text.txt").write_text(TEXT)
    short = ["trainer.max_steps=4", "validation.every=2", "data.val_fraction=0.3"]
    words = [*TINY_RUN, *short, f"data.path={top}/text.txt"]
    for name, own in {"tied": ["optim.ema=0.5"], "untied": ["head=untied"], "char": ["tokenizer=char"]}.items():
        train(composed(*words, *own, f"run_dir={top}/runs/{name}"))
    write_run_dir(top / "runs/young", composed(*words))
    return top / "runs"


# --- the views


def test_a_greedy_continuation_is_that_of_generate_and_each_token_leads():
    model = loaded("a")
    rows = [*continuations([model], PROMPT, 40, GREEDY)]
    assert "".join(row["text"] for row in rows) == generate(model.net, BYTE, PROMPT, 40)
    assert {row["rank"] for row in rows} == {1}
    assert min(row["lead"] for row in rows) >= 0
    for row in rows:
        best, *others = row["candidates"]
        assert (best["label"], best["token"], len(others)) == (row["label"], row["token"], 4)
        lead = math.log(best["share"] / others[0]["share"])
        assert lead == pytest.approx(row["lead"], abs=1e-3)  # the softmax is of these logits


def test_a_model_without_a_text_is_shown_on_the_text_of_another():
    alone, other = loaded("a"), loaded("b")
    alone.path = Path("of_transformers")
    other.text = SimpleNamespace(val=np.array([BYTE.begin, *BYTE.encode("some text")], np.uint16))
    assert scored_text([alone, other], "")["n_bytes"] == scored_text([other], "")["n_bytes"] == 9
    with refused(r"of_transformers/config\.yaml: .*or paste a text$"):
        scored_text([alone], "")


@slow
def test_attention_weights_are_those_of_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    model = loaded("a", seq_len=64, n_kv_heads=1, qk_norm=True)
    ids = [BYTE.begin, *BYTE.encode("def f(x):\n  return x")]
    export(model.net, BYTE, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    expected = torch.stack(theirs(torch.tensor([ids]), output_attentions=True).attentions)[:, 0]  # (L, H, T, S)
    for position in range(len(ids)):
        weights = attention_weights(model.net, ids, position)
        torch.testing.assert_close(weights, expected[..., position, : position + 1], rtol=0, atol=1e-5)


def test_attention_is_that_within_the_document_and_the_context():
    model = loaded("a", position="none")
    answer = attention(model, "x" * 500)
    seen = 501 - window_start(501, model.net.seq_len)  # by decoding
    assert len(answer["tokens"]) == answer["position"] + 1 == seen
    with refused(r"^position"):
        attention(model, "abc", 4)
    model.net.document_separator = BYTE.begin
    ids = [*BYTE.encode("abc"), BYTE.begin, *BYTE.encode("de")]
    assert attention_weights(model.net, ids, 5)[..., :3].abs().max() == 0


def test_the_losses_of_a_pasted_text_are_those_of_the_logits():
    model, text = loaded("a", seq_len=64), "naïve <b>bold</b>"
    answer = scored_text([model], text)
    ids = torch.tensor([[BYTE.begin, *BYTE.encode(text)]])
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model.net(ids[:, :-1])[0], ids[0, 1:], reduction="none")
    assert [row["losses"][0] for row in answer["tokens"]] == pytest.approx(expected.tolist(), rel=1e-4)
    assert "".join(row["text"] for row in answer["tokens"]) == text
    assert answer["n_bytes"] == len(text.encode())
    with refused(r"^run=byte: expected a model with the tokenizer of char$"):
        scored_text([loaded("char", CHAR), loaded("byte")], TEXT[:80])


def test_a_run_that_is_damaged_is_described_as_well_as_it_can_be(folder, tmp_path):
    assert described_run("alone", folder / "tied/model")["status"] == "model"
    (tmp_path / "config.yaml").write_text("[[")
    assert described_run("torn", tmp_path)["status"] == "broken"
    shutil.copytree(folder / "tied", tmp_path / "cut")
    (tmp_path / "cut/metrics.csv").write_bytes(b"\0\xff")
    row = described_run("cut", tmp_path / "cut")
    assert (row["status"], row["has_model"]) == ("broken", True), "and the others are listed"


# --- the server


@pytest.fixture(scope="module")
def server(folder):
    with serving(lambda: folders_with(RUN_MARKS, folder)) as server:
        yield server


@contextmanager
def serving(folders):
    with LookServer(folders) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def ask(server, method, path, body=None, **headers):
    """The status, the content and the headers of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    text = body if isinstance(body, str) or body is None else json.dumps(body)
    connection.request(method, path, text, {"Content-Type": "application/json"} | headers)
    response = connection.getresponse()
    content = response.read().decode()
    connection.close()
    return response.status, content, response.headers


def stream(port, **body):
    """A connection over which models continue a prompt, and the rows as they come."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", "/prompt", json.dumps(body), {"Content-Type": "application/json"})
    return connection, connection.getresponse()


# a request, its headers, and its body -> what the line of the refusal names
REFUSED = r"""
    GET / | {"Host": "evil.example"} | -> Host
    GET /runs | {"Host": "127.0.0.1:1"} | -> Host
    POST /text | {"Origin": "https://evil.example"} | {"runs": ["tied"]} -> https://evil.example
    POST /text | {"Origin": "null"} | {"runs": ["tied"]} -> null
    GET /../config.yaml | {} | -> config.yaml
    POST / | {} | {} -> /
    POST /text | {"Content-Length": "x"} | -> not a question
    POST /text | {} | {"runs": ["tied"], "passage": 99} -> passage=100
    POST /prompt | {} | -> not a question
    POST /prompt | {} | { -> not a question
    POST /prompt | {} | [] -> expected keys
    POST /prompt | {} | null -> expected keys
    POST /prompt | {} | "\ud800" -> expected keys
    POST /prompt | {} | {} -> runs
    POST /prompt | {} | {"runs": []} -> runs
    POST /prompt | {} | {"runs": ["tied", "tied", "tied"]} -> runs
    POST /prompt | {} | {"runs": ["../runs/tied"]} -> tied
    POST /prompt | {} | {"runs": [["tied"]]} -> runs
    POST /prompt | {} | {"runs": [{"a": 1}]} -> runs
    POST /prompt | {} | {"runs": ["young"]} -> young
    POST /attention | {} | {"runs": ["char"], "text": "\u6f22"} -> 漢
    POST /prompt | {} | {"runs": ["tied"], "colour": 1} -> colour
    POST /prompt | {} | {"runs": ["tied"], "seed": true} -> seed
    POST /prompt | {} | {"runs": ["tied"], "seed": -1} -> seed
    POST /prompt | {} | {"runs": ["char"], "prompt": "a\ud800"} -> '\ud800'
    POST /prompt | {} | {"runs": ["tied"], "max_new_tokens": 1e9} -> max_new_tokens
    POST /prompt | {} | {"runs": ["tied"], "max_new_tokens": 0} -> max_new_tokens
    POST /prompt | {} | {"runs": ["tied"], "max_new_tokens": 10000} -> max_new_tokens
    POST /prompt | {} | {"runs": ["tied"], "temperature": Infinity} -> temperature
    POST /prompt | {} | {"runs": ["tied"], "temperature": 1e-39} -> temperature
    POST /prompt | {} | {"runs": ["tied"], "temperature": 1e39} -> temperature
    POST /text | {} | {"runs": ["tied"], "text": "a\ud800"} -> '\ud800'
    POST /prompt | {} | {"runs": ["tied"], "top_k": 3} -> top_k
    POST /prompt | {} | {"runs": ["tied"], "forced": [1]} -> forced
"""


def test_a_wrong_request_gets_a_line_that_names_what_is_wrong(server):
    rows = [line.strip() for line in REFUSED.strip().splitlines()]
    for key, value, named in (("text", f'"{"x" * 5000}"', "text"), ("passage", "1" * 5000, "not a question")):
        rows.append(f'POST /text | {{}} | {{"runs": ["tied"], "{key}": {value}}} -> {named}')
    for row in rows:
        asked, _, named = row.partition(" -> ")
        request, headers, body = (part.strip() for part in asked.split("|"))
        method, path = request.split()
        status, content, _ = ask(server, method, path, body or None, **json.loads(headers))
        error = json.loads(content)["error"]
        assert (status, "\n" in error) == (400, False), row
        assert named in error, (row, error)
    assert ask(server, "PUT", "/")[0] == 501


def test_the_page_may_run_no_script_but_its_own_and_names_no_other_place(server):
    page = ""
    for path in ("/", "/look.css", "/look.js"):
        status, content, headers = ask(server, "GET", path, Host=f"localhost:{server.server_port}")
        assert status == 200
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        page += content
    assert set(re.findall(r"https?://[\w./]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", page)


def test_a_page_gets_its_answer_while_another_one_streams(server):
    connection, rows = stream(server.server_port, runs=["tied"], prompt=PROMPT, max_new_tokens=512)
    assert rows.readline()
    assert ask(server, "POST", "/attention", {"runs": ["untied"], "text": "d"})[0] == 200
    assert not rows.isclosed()
    connection.close()  # before the end, as a page that is closed
    assert ask(server, "GET", "/runs")[0] == 200
    _, rows = stream(server.server_port, runs=["tied"], prompt=PROMPT, max_new_tokens=2)
    assert [json.loads(line).get("end") for line in rows] == [None, None, True]


def test_a_port_that_is_taken_is_refused(server, folder, command):
    code, _, error = command("look", f"run_dir={folder}/tied", f"port={server.server_port}", "open=false", "threads=1")
    assert code == 2
    assert error.startswith(f"error: port={server.server_port}: ")


# --- the page in a browser


VISIBLE = """() => {
    const top = document.querySelector("#step").getBoundingClientRect().top;
    return [...document.querySelectorAll(".token")].filter((token) => {
        const box = token.getBoundingClientRect();
        return box.height && box.top > 0 && box.bottom <= top;
    }).length;
}"""


def fits_a_phone(page):
    page.set_viewport_size({"width": 390, "height": 844})
    fits = page.evaluate("document.documentElement.scrollWidth") <= 390
    page.set_viewport_size({"width": 1200, "height": 800})
    return fits


def opened(page, server, view, second="untied"):
    page.goto("about:blank")
    page.goto(f"{server.address}#{view}&first=tied&second={second}")
    page.wait_for_selector("#first option:nth-child(3)", state="attached")


@pytest.fixture(scope="module")
def page():
    with browser_page() as page:
        yield page


@slow
def test_a_prompt_is_continued_and_each_token_shows_the_candidates_of_both(page, server):
    opened(page, server, "prompt")
    page.wait_for_selector(".token.chosen")  # a line of the validation text is continued already
    page.set_viewport_size({"width": 390, "height": 844})
    page.reload()
    page.wait_for_selector(".token.chosen")
    page.wait_for_selector("#stop", state="hidden")
    assert page.evaluate(VISIBLE) > 5, "the candidates of both models leave some of the text in sight"
    page.set_viewport_size({"width": 1200, "height": 800})
    assert len(page.input_value("[name=prompt]")) >= 10
    page.fill("[name=prompt]", "def f1(x, y):\n    return x <b>")
    page.fill("[name=max_new_tokens]", "40")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".token.parts")
    page.wait_for_selector("#stop", state="hidden")
    assert page.locator(".tokens").all_inner_texts()[0].startswith("def f1(x, y):\n    return x <b>")
    assert page.locator(".token.parts").count() == 2
    parted = int(re.findall(r"token (\d+)", page.inner_text("#parting"))[0])
    tokens = [page.locator(f"#continuations > :nth-child({i}) .token") for i in (1, 2)]
    texts = [column.all_inner_texts() for column in tokens]
    assert texts[0][: parted - 1] == texts[1][: parted - 1]
    tokens[0].nth(parted - 1).hover()
    assert [page.locator(f"#step {what}").count() for what in (".bars", ".bar", ".marked")] == [2, 10, 2]
    tokens[1].first.focus()
    page.keyboard.press("ArrowRight")
    assert "token 2:" in page.inner_text("#step")
    for key in ("Enter", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    page.wait_for_selector("#back", state="visible")
    page.wait_for_selector("#stop", state="hidden")
    typed = page.input_value("[name=prompt]")
    assert typed.startswith("def f1(x, y):\n    return x <b>")
    assert [text[: len(typed)] for text in page.locator(".tokens").all_inner_texts()] == [typed, typed]
    page.click("#back")
    page.wait_for_selector("#back", state="hidden")
    assert page.input_value("[name=prompt]") == "def f1(x, y):\n    return x <b>"
    page.fill("[name=max_new_tokens]", "512")
    page.click("#prompt-form .main")
    page.click("#stop")
    stopped = page.locator(".token").count()
    for view in ("runs", "prompt"):
        page.click(f"#tab-{view}")
    assert (page.is_hidden("#stop"), page.locator(".token").count()) == (True, stopped), "what was stopped is kept"
    page.fill("[name=top_k]", "3")
    page.click("#prompt-form .main")
    page.wait_for_selector("#message:has-text('top_k=3')")
    assert fits_a_phone(page)


@slow
def test_attention_is_shown_for_a_token_by_one_head_or_by_the_mean_of_all(page, server):
    opened(page, server, "attention")
    page.wait_for_selector("#attentions > :nth-child(2) select")
    column = page.locator("#attentions > :first-child")
    column.locator(".token").nth(3).click()
    page.locator("#attentions p").filter(has_text=re.compile("^Token 4 of")).first.wait_for()
    assert column.locator(".token.unseen").count() == column.locator(".token").count() - 4
    assert "in the mean of all heads" in column.locator("p").inner_text()
    column.locator("select").select_option("0 1")
    assert "in layer 1, head 2" in column.locator("p").inner_text()
    column.locator(".token").first.hover()
    assert "% goes to token 1," in column.locator("p").inner_text()
    column.locator(".token").last.hover()
    assert "is not seen" in column.locator("p").inner_text()
    assert fits_a_phone(page)


@slow
def test_a_pasted_text_stays_text_and_has_colours_for_the_better_model(page, server):
    opened(page, server, "text")
    page.wait_for_selector("#token .bar")
    assert "Passage 1 of" in page.inner_text("#text-summary")
    page.click("#next")
    page.wait_for_selector("#text-summary:has-text('Passage 2 of')")
    page.fill("[name=text] >> visible=true", "<b>x</b><script>alert(1)</script>")
    page.click("#text-form .main")
    page.wait_for_selector("#text-summary:has-text('Your text')")
    assert page.inner_text("#scored") == "<b>x</b><script>alert(1)</script>"
    assert page.locator("#scored b").count() == 0
    backgrounds = page.evaluate("[...document.querySelectorAll('#scored .token')].map(t => t.style.background)")
    assert len(set(backgrounds)) > 5
    page.locator("#scored .token").nth(2).focus()
    assert page.locator("#token .bar").count() == 2
    page.select_option("#text-colour", "1")
    assert "8 nats" in page.inner_text("#text-scale")
    page.select_option("#second", "char")
    page.wait_for_selector("#message:has-text('with the tokenizer of')")
    assert fits_a_phone(page)


@slow
def test_without_a_model_the_page_says_what_to_type(page):
    with serving(list) as server:
        page.goto(server.address)
        page.click("#tab-prompt")
        page.fill("[name=prompt]", "def f")
        page.click("#prompt-form .main")
        assert page.inner_text("#message") == "There is no model yet. Train one: lm-lab train my.txt"


@slow
def test_runs_are_listed_while_they_train_and_open(page, server, folder):
    opened(page, server, "runs", second="")
    page.set_viewport_size({"width": 390, "height": 844})
    page.evaluate("document.querySelector('.scroll').scrollTo(40, 0)")
    page.locator(".chart").first.focus()
    write_run_dir(folder / "later", composed(*TINY_RUN, f"data.path={folder}/../text.txt"))
    page.wait_for_selector("text=later")
    kept = "[document.querySelector('.scroll').scrollLeft, document.activeElement.className]"
    assert page.evaluate(kept) == [40, "chart"], "a reader of the list stays in his place"
    assert page.get_by_role("button", name="Open later").is_disabled()
    assert page.locator("#list .chart").count() == 2  # one for each text
    page.locator(".chart").first.focus()
    page.keyboard.press("ArrowLeft")
    assert "tokens" in page.inner_text(".tip")
    page.get_by_role("button", name="Open char").click()
    assert page.input_value("#first") == "char"
    page.wait_for_selector("#prompt .token.chosen")
    assert fits_a_phone(page)
