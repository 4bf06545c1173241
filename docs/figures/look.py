"""Draw look-*.png, pictures of the page of scripts/look.py: python docs/figures/look.py RUNS

RUNS is a folder with two runs, which these commands train in a few minutes:

python scripts/train.py -m head=tied,untied run_dir='RUNS/${head.name}' trainer.max_steps=400 trainer=cpu threads=1 \
    tokenizer.vocab_size=1024 data.seq_len=128 data.batch_size=16 \
    model.n_layers=3 model.d_model=96 model.n_heads=4 model.d_ff=256
"""

import io
import sys
import threading
from pathlib import Path
from typing import Any

from PIL import Image

from lm.look.server import LookServer
from lm.runs.find import MARKS, folders_with
from tests.helpers.browser import browser_page

HERE = Path(__file__).parent


def prompt(page: Any) -> None:
    page.fill("[name=prompt]", "def __init__(self")
    page.click("#prompt-form .main")
    page.wait_for_selector("#stop", state="hidden")
    page.locator("#continuations .token.parts").first.hover()


def text(page: Any) -> None:
    page.fill("[name=passage]", "3")
    page.click("#text-form .main")
    page.locator("#scored .token").nth(30).hover()


def matrices(page: Any) -> None:
    page.fill("[name=token]", "self")
    page.click("#matrices-form .main")
    page.wait_for_selector("#embeddings svg")


def main(folder: Path) -> None:
    with LookServer(lambda: folders_with(MARKS, folder)) as server, browser_page(1080, 800) as page:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.goto(server.address)
        page.wait_for_selector("#first option:nth-child(2)", state="attached")
        for view in (prompt, text, matrices):
            page.click(f"#tab-{view.__name__}")
            view(page)
            page.evaluate("scrollTo(0, 0)")
            image = Image.open(io.BytesIO(page.screenshot(full_page=view is matrices)))
            image.quantize(256, dither=Image.Dither.NONE).save(HERE / f"look-{view.__name__}.png", optimize=True)
        server.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
