"""How Sphinx builds the site: ``python -m sphinx -W -b html docs build/html`` from the root of a checkout.

The guides are Markdown files that also read well on a code host, so their links may leave this folder. While a page is
read, a link to a file that has a page here leads to that page, and a link to any other file of the repository offers
the file for download.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

import bsrgemm  # noqa: E402

project = "bsrgemm"
author = "the authors of bsrgemm"
version = release = bsrgemm.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc"]
exclude_patterns = ["README.md"]
templates_path = ["_templates"]
root_doc = "index"
default_role = "code"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autosummary_generate = True
autodoc_default_options = {"members": False}
autodoc_typehints = "none"
numpydoc_show_class_members = False

html_theme = "furo"
html_title = f"bsrgemm {release}"
html_copy_source = False

#: Pages of the site whose text is a file elsewhere in the repository.
INCLUDED = {
    "about/changes": "CHANGELOG.md",
    "about/contributing": "CONTRIBUTING.md",
    "about/results": "bench/RESULTS.md",
    "about/lab-book": "bench/NOTES.md",
}
_PAGE_OF = {ROOT / path: name for name, path in INCLUDED.items()} | {DOCS / "README.md": "index"}
#: A link or a picture with a relative target: what stands before it, its words, the target.
_LINK = re.compile(r"(?P<picture>!?)\[(?P<words>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s:#][^()\s:]*)\)")
#: The pages of the kernels, which the table of their index lists for readers without the site.
_KERNELS = """
```{toctree}
:hidden:
:glob:

[a-z]*
```
"""
_FENCE = re.compile(r"^ *(```|~~~)", re.MULTILINE)


def with_links_of_the_site(text: str, folder: Path, page: str) -> str:
    """The Markdown `text` of a file in `folder` with links that lead somewhere from `page` of the site."""
    parts = re.split(r"(^ *(?:```|~~~).*?^ *(?:```|~~~) *$)", text, flags=re.MULTILINE | re.DOTALL)
    here = (DOCS / page).parent

    def link(found: re.Match[str]) -> str:
        path, _, fragment = found["target"].partition("#")
        target = (folder / path).resolve()
        if target in _PAGE_OF:
            target = DOCS / f"{_PAGE_OF[target]}.md"
        where = os.path.relpath(target, here)
        if found["picture"] or (target.is_relative_to(DOCS) and target.suffix == ".md"):
            return f"{found['picture']}[{found['words']}]({where}{'#' + fragment if fragment else ''})"
        words = found["words"].replace("`", "")
        return f"{{download}}`{words} <{where}>`" if target.is_file() else found["words"]

    return "".join(part if _FENCE.match(part) else _LINK.sub(link, part) for part in parts)


def _read(app: Any, page: str, source: list[str]) -> None:
    """Replace the text of a page as it is read."""
    if Path(app.env.doc2path(page)).suffix != ".md":
        return
    if page in INCLUDED:
        path = ROOT / INCLUDED[page]
        app.env.note_dependency(str(path))
        source[0] = with_links_of_the_site(path.read_text(encoding="utf-8"), path.parent, page)
    else:
        source[0] = with_links_of_the_site(source[0], (DOCS / page).parent, page)
    if page == "kernels/README":
        source[0] += _KERNELS


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
