"""What the pages say is what happens: their examples, links and tables.

A ```python block with prompts is a doctest, one without is executed; the blocks of a page share their names, in order.
A block after a line `<!-- needs a GPU -->` runs where there is one, and a block after `<!-- needs torch -->`, or
`<!-- needs torch and a GPU -->`, where that package can be imported; elsewhere such a block is only compiled.
"""

from __future__ import annotations

import doctest
import importlib.util
import itertools
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
README = ROOT / "README.md"
#: Pages without examples to run.
OTHERS = [README, *(ROOT / name for name in ("CHANGELOG.md", "SECURITY.md", "bench/RESULTS.md", "bench/NOTES.md"))]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

_FENCE = re.compile(r" *(?P<ticks>`{3,}|~{3,})(?P<language>[\w+-]*)")
_PROMPT = re.compile(r"^ *>>> ", re.MULTILINE)
_NEEDS = re.compile(r"<!-- needs (?P<what>[\w ]+) -->")
_LINK = re.compile(
    r"\]\(\s*<?([^()<>\s]+)>?(?:\s+\"[^\"]*\")?\s*\)|^ {0,3}\[[^\]]+\]:\s*(\S+)|(?:src|href)=\"([^\"]+)\""
)
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)
_HEADING = re.compile(r" {0,3}#{1,6}\s+(.*?)\s*#*\s*$")
_LINES = re.compile(r"L(\d+)(?:-L(\d+))?")
_DELIMITER = re.compile(r"\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*")


class Fence(NamedTuple):
    """A fenced block of code."""

    language: str
    code: str
    #: of its first line of code in the file, from 1
    line: int
    #: "a GPU" and names of packages
    needs: tuple[str, ...]

    @property
    def runs_here(self) -> bool:
        """Is everything here that the block needs?"""
        return all(has_cuda() if what == "a GPU" else importlib.util.find_spec(what) is not None for what in self.needs)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


def _lines(text: str) -> Iterator[tuple[int, str, Fence | None]]:
    """(number, line, None) for each line outside of code, (number, "", block) where a block of code ends."""
    opened: re.Match[str] | None = None
    code: list[str] = []
    start, before = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if opened is None:
            opened = _FENCE.match(line)
            if opened is None:
                before = line.strip() or before
                yield number, line, None
            else:
                code, start = [], number + 1
        elif re.fullmatch(rf" *{opened['ticks'][0]}{{{len(opened['ticks'])},}}\s*", line):
            body = textwrap.dedent("\n".join(code)) + "\n"
            needs = _NEEDS.fullmatch(before)
            yield (
                number,
                "",
                Fence(opened["language"], body, start, tuple(needs["what"].split(" and ")) if needs else ()),
            )
            opened, before = None, ""
        else:
            code.append(line)
    assert opened is None, f"line {start - 1}: a block of code without an end"


def prose(text: str) -> list[tuple[int, str]]:
    """The lines outside of code, with their numbers; a block of code is an empty one."""
    return [(number, line) for number, line, _ in _lines(text)]


# ------------------------------------------------------------------------------------------- examples
def run_examples(page: Path) -> None:
    """Run or, where they need something that is not here, compile the Python blocks of a page."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for _, _, block in _lines(page.read_text(encoding="utf-8")):
        if block is None or block.language != "python":
            continue
        how = _doctest if _PROMPT.search(block.code) else _script
        try:
            problem = how(page, block, names, run=block.runs_here)
        except Exception as error:
            where = f"{_name(page)}:{_line_of(error, page, block)}"
            problem = f"{where}: {type(error).__name__}: {error}\n\n{block.code}"
        assert not problem, problem


def _line_of(error: Exception, page: Path, block: Fence) -> int:
    """The line of the page that was under way."""
    if isinstance(error, SyntaxError) and error.lineno:
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno for f in reversed(frames) if f.filename == str(page) and f.lineno), block.line)


def _script(page: Path, block: Fence, names: dict[str, Any], run: bool) -> str:
    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
    if run:
        exec(code, names)
    return ""


def _doctest(page: Path, block: Fence, names: dict[str, Any], run: bool) -> str:
    """What differs, in doctest's words."""
    parsed = doctest.DocTestParser().get_doctest(block.code, names, _name(page), _name(page), block.line - 1)
    if not run:
        for example in parsed.examples:
            compile("\n" * (block.line + example.lineno - 1) + example.source, str(page), "exec")
        return ""
    said: list[str] = []
    parsed.globs = names  # not a copy: the next block goes on with them
    doctest.DocTestRunner(optionflags=OPTIONS).run(parsed, out=said.append, clear_globs=False)
    return "".join(said)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_the_examples_of_the_page_run(page: Path) -> None:
    run_examples(page)


# ---------------------------------------------------------------------------------------------- links
def anchors(text: str) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    seen: Counter[str] = Counter()
    for _, line in prose(text):
        heading = _HEADING.match(line)
        if heading:
            words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return found


def broken_links(page: Path) -> list[str]:
    """Relative links and pictures of a page that lead nowhere, with their lines."""
    problems = []
    for number, line in prose(page.read_text(encoding="utf-8")):
        for found in _LINK.finditer(re.sub(r"(`+).*?\1", "", line)):
            link = next(filter(None, found.groups()))
            if not _ELSEWHERE.match(link) and (reason := _leads_nowhere(page, link)):
                problems.append(f"{_name(page)}:{number}: {link}: {reason}")
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
    last = int(lines[2] or lines[1]) if lines else 0
    length = len(target.read_text(encoding="utf-8").splitlines()) if target.is_file() else 0
    return "" if 0 < last <= length else "there is no such place"


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=_name)
def test_the_links_of_the_page_lead_somewhere(page: Path) -> None:
    problems = broken_links(page)
    assert not problems, "\n".join(problems)


# --------------------------------------------------------------------------------------------- tables
def ragged_rows(page: Path) -> list[str]:
    """Rows of tables that have more or fewer cells than their header, or no header."""
    problems = []
    header = 0  # cells of the table that a line may belong to
    lines = prose(page.read_text(encoding="utf-8"))
    for (number, line), (_, below) in itertools.pairwise([*lines, (0, "")]):
        if header == 0 and "|" in line and "|" in below and _DELIMITER.fullmatch(below):
            header = _cells(line)
        elif not line.strip():
            header = 0
        elif header == 0 and line.lstrip().startswith("|"):
            problems.append(f"{_name(page)}:{number}: a row without a header: {line}")
        elif header and _cells(line) != header:
            problems.append(f"{_name(page)}:{number}: {_cells(line)} cells below a header of {header}: {line}")
    return problems


def _cells(row: str) -> int:
    return len(re.split(r"(?<!\\)\|", re.sub(r"^\s*\||(?<!\\)\|\s*$", "", row)))


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=_name)
def test_the_rows_of_tables_are_as_wide_as_their_headers(page: Path) -> None:
    problems = ragged_rows(page)
    assert not problems, "\n".join(problems)


# ------------------------------------------------------------------------------ the checks can fail
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("```python\nx = 1\nassert x == 2\n```\n", "page.md:3: AssertionError"),
        ("```python\nx = 1\n```\n\n```python\n>>> x\n2\n```\n", '"page.md", line 6'),
        ("Text.\n\n```python\n>>> 1 / 0\n```\n", "ZeroDivisionError"),
        ("```python\ndef f(:\n```\n", "page.md:2: SyntaxError"),
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


def test_an_example_that_needs_a_gpu_is_not_run_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- needs a GPU -->\n```python\nassert False\n```\n\n```python\nx = 1\n```\n")
    monkeypatch.setattr(f"{__name__}.has_cuda", lambda: False)
    run_examples(page)
    monkeypatch.setattr(f"{__name__}.has_cuda", lambda: True)
    with pytest.raises(AssertionError, match=r"page.md:3"):
        run_examples(page)


def test_an_example_that_needs_a_package_runs_where_the_package_is(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- needs no_such_package -->\n```python\nassert False\n```\n")
    run_examples(page)
    page.write_text("<!-- needs numpy -->\n```python\nassert False\n```\n")
    with pytest.raises(AssertionError, match=r"page.md:3"):
        run_examples(page)


@pytest.mark.parametrize(
    ("link", "told"),
    [
        ("[a](absent.md)", "no such file"),
        ("![a](absent.png)", "no such file"),
        ('<img src="absent.png">', "no such file"),
        ("[a]: absent.md", "no such file"),
        ("[a](page.md#absent)", "no such heading"),
        ("[a](#absent)", "no such heading"),
        ("[a](code.py#L3)", "no such place"),
    ],
)
def test_a_link_that_leads_nowhere_is_told(tmp_path: Path, link: str, told: str) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "code.py").write_text("1\n2\n")
    good = "# `A.T`: what, [where](x.md)?\n## Again\n## Again\n"
    page.write_text(
        f"{good}[a](#at-what-where) [b](page.md#again-1) [c](code.py#L1-L2) [d](https://x.org/#y) `[e](f)`\n"
    )
    assert not [p for p in broken_links(page) if "x.md" not in p]
    page.write_text(f"Text.\n\n{link}\n\n```sh\n[no](link)\n```\n")
    (problem,) = broken_links(page)
    assert problem.startswith("page.md:3: ") and told in problem


@pytest.mark.parametrize("row", ["| 1 |", "| 1 | 2 | 3 |", "1", "| 1 \\| 2 |", "\n| 1 | 2 |"])
def test_a_row_that_is_too_wide_or_too_narrow_is_told(tmp_path: Path, row: str) -> None:
    page = tmp_path / "page.md"
    good = "| a | b |\n| --- | ---: |\n| 1 | 2 |\n| `x \\| y` |  |\n"
    page.write_text(f"{good}\nText.\n\n```text\n| 1 |\n```\n")
    assert not ragged_rows(page)
    page.write_text(good + row + "\n")
    assert len(ragged_rows(page)) == 1


def test_every_room_and_module_is_on_the_map_of_the_package() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = text.partition("## The rooms")[2].partition("```text\n")[2].partition("```")[0]
    inside, outside = tree.removeprefix("bsrgemm/\n").partition("\ncuda/")[::2]
    listed = set(re.findall(r"^  (\w+\.py|\w+/) ", inside, re.MULTILINE))
    package = ROOT / "bsrgemm"
    rooms = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert listed == rooms | {path.name for path in package.glob("*.py")} - {"_version.py"}
    for folder in re.findall(r"^(\w+)/", f"cuda/{outside}", re.MULTILINE):
        assert (ROOT / folder).is_dir()
