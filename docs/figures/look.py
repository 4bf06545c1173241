"""Draw look-*.png, pictures of the page of scripts/look.py, and report.png: python docs/figures/look.py RUNS

RUNS is a folder with two runs, which these commands train in a few minutes:

python scripts/train.py -m head=tied,untied run_dir='RUNS/${head.name}' trainer.max_steps=400 trainer=cpu threads=1 \
    tokenizer.vocab_size=1024 data.seq_len=128 data.batch_size=16 \
    model.n_layers=3 model.d_model=96 model.n_heads=4 model.d_ff=256
"""

import io
import shutil
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from lm.folder import RUN_MARKS, folders_with
from lm.lab.ablation.report import write_report
from lm.lab.ablation.results import read_results
from lm.lab.look.server import LookServer
from tests.helpers.browser import browser_page

HERE = Path(__file__).parent


def prompt(page: Any) -> None:
    page.wait_for_selector(".token.chosen")
    page.fill("[name=prompt]", "def __init__(self")
    page.click("#prompt-form .main")
    page.wait_for_selector("#stop", state="hidden")
    page.locator("#continuations .token.parts").first.click()


def attention(page: Any) -> None:
    page.wait_for_selector("#attentions > :nth-child(2) select")
    for select in page.locator("#attentions select").all():
        select.select_option("0 3")  # layer 1, head 4


def text(page: Any) -> None:
    page.wait_for_selector("#scored .token")
    page.fill("[name=passage]", "3")
    page.click("#text-form .main")
    page.wait_for_selector("#text-summary:has-text('Passage 3 of')")
    page.locator("#scored .token").nth(30).click()


def save(page: Any, name: str) -> None:
    image = Image.open(io.BytesIO(page.screenshot()))
    image.quantize(256, dither=Image.Dither.NONE).save(HERE / f"{name}.png", optimize=True)


def main(folder: Path) -> None:
    with LookServer(lambda: folders_with(RUN_MARKS, folder)) as server, browser_page() as page:
        page.set_viewport_size({"width": 1080, "height": 800})
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for view in (prompt, attention, text):
            page.goto("about:blank")
            page.goto(f"{server.address}#{view.__name__}")
            view(page)
            page.evaluate("scrollTo(0, 0)")
            page.mouse.move(0, 0)
            save(page, f"look-{view.__name__}")
        server.shutdown()
        with TemporaryDirectory() as scratch:
            study = shutil.copytree(HERE.parent / "studies/heads", Path(scratch, "heads"))
            write_report(read_results(study))
            page.goto((study / "report.html").as_uri())
            save(page, "report")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
