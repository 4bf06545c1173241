"""A hook of mkdocs: the files beside docs/ to which pages link become files of the site, below project/."""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files  # installed with mkdocs-material alone, as mkdocs.yml says

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
OTHERS = ("CITATION.cff", "LICENSE", "tests/test_model.py", "lm/lab/formats/templates/model.js")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)[^)\s#]+")


def on_files(files: Files, config: Any) -> Files:
    for name in (*PAGES, *OTHERS):
        files.append(File.generated(config, f"project/{name}", content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page with the links between docs/ and the files beside docs/ as they are on the site."""
    place = page.file.src_uri
    folder = dirname(place.removeprefix("project/") if place.startswith("project/") else f"docs/{place}")

    def on_site(link: re.Match[str]) -> str:
        path = normpath(join(folder, link[0]))
        is_page = path.startswith("docs/")
        if is_page and folder.startswith("docs"):
            return link[0]
        return relpath(path.removeprefix("docs/") if is_page else f"project/{path}", dirname(place) or ".")

    return LINK.sub(on_site, markdown)
