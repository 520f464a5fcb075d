"""The examples of the pages run, and their links lead somewhere.

A ```python block with prompts is a doctest, one without is executed; the blocks of a page share their names, in order.
A block after a line `<!-- needs a GPU -->` runs where there is one, and a block after `<!-- needs torch -->`, or
`<!-- needs torch and a GPU -->`, where that package can be imported; elsewhere such a block is only compiled.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import re
import textwrap
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest

from ..conftest import has_cuda
from .test_readme import ROOT

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]
#: Pages without examples to run.
OTHERS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md", "bench/RESULTS.md", "bench/NOTES.md")]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

_BLOCK = re.compile(
    r"(?:^<!-- needs (?P<needs>[\w ]+) -->\n\s*)?^ *(?P<ticks>`{3,}|~{3,})(?P<language>[\w+-]*)[^\n]*\n"
    r"(?P<code>.*?)(?:^ *(?P=ticks)[ \t]*$|(?P<open>\Z))",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(
    r"\]\(\s*<?([^()<>\s]+)>?[^()]*\)|^ {0,3}\[[^\]]+\]:\s*(\S+)|(?:src|href)=\"([^\"]+)\"", re.MULTILINE
)
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)
_LINES = re.compile(r"L(\d+)(?:-L(\d+))?")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


# ------------------------------------------------------------------------------------------- examples
class Example(NamedTuple):
    """A block of Python on a page."""

    page: Path
    code: str
    #: of its first line of code in the file, from 0
    line: int
    #: Is everything here that it needs?
    runs: bool


def examples(page: Path) -> Iterator[Example]:
    text = page.read_text(encoding="utf-8")
    for block in _BLOCK.finditer(text):
        assert block["open"] is None, f"{_name(page)}: a block of code without an end"
        if block["language"] == "python":
            needs = (block["needs"] or "").split(" and ") if block["needs"] else []
            runs = all(has_cuda() if what == "a GPU" else importlib.util.find_spec(what) is not None for what in needs)
            yield Example(page, textwrap.dedent(block["code"]), text.count("\n", 0, block.start("code")), runs)


def run_examples(page: Path) -> None:
    """Run or, where they need something that is not here, compile the Python blocks of a page."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for example in examples(page):
        try:
            problem = (_doctest if re.search(r"^ *>>> ", example.code, re.MULTILINE) else _script)(example, names)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == str(page) and frame.lineno]
            line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else example.line + 1
            problem = f"{_name(page)}:{line}: {type(error).__name__}: {error}\n\n{example.code}"
        assert not problem, problem


def _script(example: Example, names: dict[str, Any]) -> str:
    code = compile("\n" * example.line + example.code, str(example.page), "exec")
    if example.runs:
        exec(code, names)
    return ""


def _doctest(example: Example, names: dict[str, Any]) -> str:
    """What differs, in doctest's words."""
    name = _name(example.page)
    parsed = doctest.DocTestParser().get_doctest(example.code, names, name, name, example.line)
    if not example.runs:
        for part in parsed.examples:
            compile("\n" * (example.line + part.lineno) + part.source, str(example.page), "exec")
        return ""
    said: list[str] = []
    parsed.globs = names  # not a copy: the next block goes on with them
    doctest.DocTestRunner(optionflags=OPTIONS).run(parsed, out=said.append, clear_globs=False)
    return "".join(said)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_the_examples_of_the_page_run(page: Path) -> None:
    run_examples(page)


# ---------------------------------------------------------------------------------------------- links
def prose(text: str) -> str:
    """A page without its code; its lines keep their numbers."""
    return re.sub(r"(`+)[^\n]*?\1", "", _BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text))


def anchors(text: str) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    found: Counter[str] = Counter()
    for heading in re.findall(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$", _BLOCK.sub("", text), re.MULTILINE):
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found[re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")] += 1
    return {f"{slug}-{again}" if again else slug for slug, times in found.items() for again in range(times)}


def broken_links(page: Path) -> list[str]:
    """Relative links and pictures of a page that lead nowhere, with their lines."""
    problems, text = [], prose(page.read_text(encoding="utf-8"))
    for found in _LINK.finditer(text):
        link = next(filter(None, found.groups()))
        if not _ELSEWHERE.match(link) and (reason := _leads_nowhere(page, link)):
            problems.append(f"{_name(page)}:{text.count(chr(10), 0, found.start()) + 1}: {link}: {reason}")
    return problems


def _leads_nowhere(page: Path, link: str) -> str:
    path, _, fragment = link.partition("#")
    target = (page.parent / unquote(path)).resolve() if path else page
    if not target.exists():
        return "there is no such file"
    if path and page.is_relative_to(ROOT) and not target.is_relative_to(ROOT):
        return "it leaves the repository"
    if not fragment:
        return ""
    if target.suffix == ".md":
        return "" if fragment in anchors(target.read_text(encoding="utf-8")) else "there is no such heading"
    lines = _LINES.fullmatch(fragment)
    length = len(target.read_text(encoding="utf-8").splitlines()) if target.is_file() else 0
    return "" if lines and 0 < int(lines[2] or lines[1]) <= length else "there is no such place"


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=_name)
def test_the_links_of_the_page_lead_somewhere(page: Path) -> None:
    problems = broken_links(page)
    assert not problems, "\n".join(problems)


# ------------------------------------------------------------------------------ the checks can fail
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("```python\nx = 1\nassert x == 2\n```\n", "page.md:3: AssertionError"),
        ("```python\nx = 1\n```\n\n```python\n>>> x\n2\n```\n", '"page.md", line 6'),
        ("<!-- needs a GPU -->\n```python\ndef f(:\n```\n", "page.md:3: SyntaxError"),
        ("<!-- needs a GPU -->\n\n```python\n>>> 1\n1\n>>> 1 +\n```\n", "page.md:6: SyntaxError"),
        ("- A list:\n\n  ```python\n  assert False\n  ```\n", "page.md:4: AssertionError"),
        ("```python\n1\n", "a block of code without an end"),
    ],
)
def test_an_example_that_fails_is_told_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(AssertionError) as failure:
        run_examples(page)
    assert told in str(failure.value)


def test_an_example_that_needs_what_is_not_here_is_only_compiled(tmp_path: Path, monkeypatch: Any) -> None:
    page = tmp_path / "page.md"
    for needs, there in (("a GPU", True), ("a GPU", False), ("no_such_package", False), ("numpy", True)):
        monkeypatch.setattr(f"{__name__}.has_cuda", lambda there=there: there)
        page.write_text(f"<!-- needs {needs} -->\n```python\nassert False\n```\n\n```python\nx = 1\n```\n")
        with pytest.raises(AssertionError, match=r"page.md:3") if there else contextlib.nullcontext():
            run_examples(page)


@pytest.mark.parametrize(
    ("link", "told"),
    [
        ("[a](absent.md)", "no such file"),
        ('<img src="absent.png">', "no such file"),
        ("[a]: absent.md", "no such file"),
        ("[a](page.md#absent)", "no such heading"),
        ("[a](code.py#L3)", "no such place"),
    ],
)
def test_a_link_that_leads_nowhere_is_told(tmp_path: Path, link: str, told: str) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "code.py").write_text("1\n2\n")
    good = "# `A.T`: what, [where](page.md)?\n## Again\n## Again\n"
    page.write_text(
        f"{good}[a](#at-what-where) [b](page.md#again-1) [c](code.py#L1-L2) [d](https://x.org/#y) `[e](f)`\n"
    )
    assert not broken_links(page)
    page.write_text(f"Text.\n\n{link}\n\n```sh\n[no](link)\n```\n")
    (problem,) = broken_links(page)
    assert problem.startswith("page.md:3: ") and told in problem
