"""The site: the reference has an entry for every public name, every page is reached, and Sphinx builds all of it."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import bsrgemm as bg
import bsrgemm.interop.mpi
from bench import studies
from bench.__main__ import COMMANDS
from bench.__main__ import main as measure
from bsrgemm.__main__ import main

from .test_readme import ROOT

DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
#: Classes whose methods and properties the reference lists one by one.
CLASSES = (bg.bsr_array, bg.bsr_matrix, bg.bsr_batch, bg.BlockMask, bg.KVCache, bg.ProductPlan)

#: Classes that functions make and protocols: nobody calls their constructors with parameters.
_NOT_CALLED = (
    "interop.dask.PanelArray",
    "interop.mpi.DistributedMatrix",
    "interop.communicator.Communicator",
    "interop.communicator.OneRank",
)

_TABLE = re.compile(r"^\.\. autosummary::\n(?: {3}:.*\n)*\n((?: {3}\S+\n)+)", re.MULTILINE)
_TOCTREE = re.compile(r"(?:^```\{toctree\}\n|^\.\. toctree::\n)((?:.*\n)*?)(?:```|\Z)", re.MULTILINE)


def listed(text: str) -> list[str]:
    """The names in the tables of a page of the reference."""
    return [name for table in _TABLE.findall(text) for name in table.split()]


@cache
def reference() -> tuple[str, ...]:
    return tuple(name for path in sorted(REFERENCE.glob("*.rst")) for name in listed(path.read_text(encoding="utf-8")))


def own_names(kind: type) -> set[str]:
    """Public methods and properties of a class; those that it shares with another one are on the page of the latter."""
    names = {name for name in dir(kind) if not name.startswith("_")}
    other = {bg.bsr_matrix: bg.bsr_array, bg.linalg.Multigrid: bg.linalg.Preconditioner}.get(kind)
    if other is not None:
        names -= {n for n in names if inspect.getattr_static(other, n, None) is inspect.getattr_static(kind, n)}
    if "__call__" in vars(kind):
        names.add("__call__")
    return {f"{prefix(kind)}{kind.__name__}.{name}" for name in names}


def prefix(kind: type) -> str:
    return "linalg." if kind.__module__.startswith("bsrgemm.linalg") else ""


@pytest.mark.parametrize(
    ("start", "names"),
    [
        ("", set(bg.__all__) - {"__version__"}),
        ("linalg.", bg.linalg.__all__),
        ("interop.mpi.", bsrgemm.interop.mpi.__all__),
    ],
)
def test_the_reference_lists_every_public_name_once(start: str, names: Collection[str]) -> None:
    found = [name.removeprefix(start) for name in reference() if name.startswith(start)]
    assert sorted(name for name in found if "." not in name) == sorted(names)


@pytest.mark.parametrize(
    "kind", [*CLASSES, bg.linalg.Preconditioner, bg.linalg.Multigrid], ids=lambda kind: kind.__name__
)
def test_the_reference_lists_every_method_and_property_once(kind: type) -> None:
    found = sorted(name for name in reference() if name.startswith(f"{prefix(kind)}{kind.__name__}."))
    assert found == sorted(own_names(kind))


def test_the_reference_lists_every_name_of_the_panels_once() -> None:
    panels = pytest.importorskip("bsrgemm.interop.dask", reason="the names need the extra 'dask'")
    names = [name.removeprefix("interop.dask.") for name in reference() if name.startswith("interop.dask.")]
    assert sorted(name for name in names if "." not in name) == sorted(panels.__all__)


@pytest.mark.parametrize("name", reference())
def test_every_name_of_the_reference_is_explained_with_all_its_parameters(name: str) -> None:
    kind = pkgutil.resolve_name(f"bsrgemm.{name}")
    text = inspect.getdoc(kind) or ""
    assert text
    if not callable(kind) or isinstance(kind, ModuleType) or name in _NOT_CALLED:
        return
    try:
        parameters = inspect.signature(kind).parameters
    except ValueError:  # an exception has none
        return
    section = re.search(r"^Parameters\n-+\n(.*?)(?=^\w[\w ]*\n-+\n|\Z)", text, re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^(\S.*)$", section[1] if section else "", re.MULTILINE)
    explained = {part.strip().lstrip("*") for line in lines for part in line.partition(" : ")[0].split(",")}
    assert explained == set(parameters) - {"self", "cls"}


def test_every_public_class_is_one_whose_methods_are_listed() -> None:
    assert {getattr(bg, name) for name in bg.__all__ if inspect.isclass(getattr(bg, name))} == set(CLASSES)


def test_every_page_is_in_a_table_of_contents() -> None:
    listed_pages: set[Path] = {DOCS / "index"}
    for index in (DOCS / "index.md", REFERENCE / "index.rst"):
        for body in _TOCTREE.findall(index.read_text(encoding="utf-8")):
            entries = [line.strip() for line in body.splitlines() if line.strip() and not line.strip().startswith(":")]
            listed_pages |= {index.parent / entry for entry in entries}
    pages = {
        path.with_suffix("") for pattern in ("*.md", "about/*.md", "reference/*.rst") for path in DOCS.glob(pattern)
    }
    assert pages - {DOCS / "README"} == listed_pages - {DOCS / "kernels" / "README"}


def test_every_kernel_has_its_line_in_the_index_of_kernels_and_the_line_a_page() -> None:
    folder = DOCS / "kernels"
    index = (folder / "README.md").read_text(encoding="utf-8")
    lines = re.findall(
        r"^\| \[`(\w+)`\]\(../../cuda/(\w+)\.cu\) \|.*\| \[[^\]]+\]\(([\w-]+)\.md\) \|$", index, re.MULTILINE
    )
    assert sorted(name for name, _, _ in lines) == sorted(path.stem for path in (ROOT / "cuda").glob("*.cu"))
    assert all(name == source for name, source, _ in lines)
    assert {page for _, _, page in lines} == {path.stem for path in folder.glob("*.md")} - {"README", "counts"}


def command_lines() -> list[tuple[str, str, str]]:
    """The command lines on all pages: page, "bsrgemm" or "bench", and the words after ``python -m`` and that name."""
    pages = [
        *DOCS.rglob("*.md"),
        *REFERENCE.glob("*.rst"),
        *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING")),
    ]
    found = re.compile(r"python -m (bsrgemm|bench) ([\w-]+[^`\n#&|]*)")
    return [
        (page.name, name, line.strip())
        for page in pages
        for name, line in found.findall(page.read_text(encoding="utf-8"))
    ]


@cache
def help_of(name: str, command: str) -> str:
    run = {"bsrgemm": main, "bench": measure}[name]
    with pytest.raises(SystemExit) as stop, contextlib.redirect_stdout(io.StringIO()) as said:
        run(["--help"] if command[0] == "-" else [command, "--help"])
    assert stop.value.code == 0
    return said.getvalue()


def test_the_command_lines_on_the_pages_use_options_that_exist() -> None:
    lines = command_lines()
    assert len(lines) > 30
    for page, name, line in lines:
        command, *words = line.partition(" -- ")[0].split()  # what follows are options of another program
        known = set(re.findall(r"(?<![\w-])--?[\w-]+", help_of(name, command)))
        assert {word for word in [command, *words] if re.fullmatch(r"--?[a-z][\w-]*", word)} <= known, (page, line)
        if name == "bench" and command not in COMMANDS and command[0] != "-":
            assert command in studies.ALL or command == "STUDY", (page, line)


# ------------------------------------------------------------------------------------------- links
@cache
def conf() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bsrgemm_docs_conf", DOCS / "conf.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_that_leave_the_folder_lead_somewhere_on_the_site() -> None:
    inside = "[a](limits.md#time) [b](https://example.org/x.md) [c](#here) ![d](pictures/x.svg)"
    leaving = "[a](../bench/RESULTS.md#x) [`b`](../cuda/expand.cu) [c](../bench)\n```sh\n[d](../CONTRIBUTING.md)\n```\n"
    wanted = "[a](about/results.md#x) {download}`b <../cuda/expand.cu>` c\n```sh\n[d](../CONTRIBUTING.md)\n```\n"
    assert conf().with_links_of_the_site(inside, DOCS, "page") == inside
    assert conf().with_links_of_the_site(leaving, DOCS, "page") == wanted


def test_an_included_page_has_its_file_and_links_from_there() -> None:
    made = conf().with_links_of_the_site("[a](docs/limits.md) [b](README.md)", ROOT, "about/changes")
    assert made == "[a](../limits.md) {download}`b <../../README.md>`"
    for page, path in conf().INCLUDED.items():
        assert (ROOT / path).is_file() and (DOCS / f"{page}.md").is_file()


# ------------------------------------------------------------------------------------------- build
@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_parser", "numpydoc", "furo"):
        pytest.importorskip(package, reason="the site needs the extra 'docs'")
    shutil.rmtree(REFERENCE / "generated", ignore_errors=True)  # pages of names that are gone
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", str(tmp_path / "html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    made = {path.stem for path in (tmp_path / "html" / "reference" / "generated").glob("*.html")}
    assert made == {f"bsrgemm.{name}" for name in reference()}
