"""The pages of docs/kernels name what is there: every kernel, its picture, constants, functions, files and tests."""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from bsrgemm._kernels import sources

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "kernels"
PICTURES = ROOT / "docs" / "pictures" / "kernels"
#: Kernel -> its source. A kernel is named as its file.
KERNELS = {path.stem: path.name for path in sorted(sources.cuda_root().glob("*.cu"))}
#: Where a file may lie that a page names without its folder.
FOLDERS = (".", "bsrgemm", "cuda", "tests", "docs")
#: spmm has two pictures: its blocks come in one of two ways.
MORE_PICTURES = {"spmm_staged"}
_MOST_BYTES, _LEAST_POINTS = 80_000, 8.0

_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_FILE = re.compile(r"[\w./-]+\.(?:py|cuh?|md|json|svg)\b")
_CONSTANT = re.compile(r"\bk[A-Z]\w*")
_NAMES_OF_A_FILE = re.compile(r"((?:`[\w.]+`(?:, | and )?)+) of `(bsrgemm/[\w/]+\.py)`")
_NAME = re.compile(r"[A-Za-z_][\w.:]*(?:\(\))?")


def page(kernel: str) -> str:
    return (PAGES / f"{kernel}.md").read_text(encoding="utf-8")


@cache
def own_source(kernel: str) -> str:
    """The code of a kernel and of the headers that it includes, without comments."""
    return "\n".join(map(sources.strip, sources.gather(KERNELS[kernel]).values()))


@cache
def words() -> frozenset[str]:
    """Every word of the package, the kernels, the tests and the benchmarks, this file aside."""
    files = [*ROOT.glob("cuda/**/*.cu*"), *ROOT.glob("bench/*.py"), *ROOT.glob("bsrgemm/**/*.py")]
    files += [path for path in ROOT.glob("tests/**/*.py") if path != Path(__file__)]
    return frozenset(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in files)))


def missing_files(text: str) -> list[str]:
    """The files in backticks that are not there."""
    found = [name for span in _CODE.findall(text) for name in _FILE.findall(span)]
    return [name for name in found if not any((ROOT / folder / name).is_file() for folder in FOLDERS)]


def missing_names(text: str) -> list[str]:
    """The names in backticks, dotted or not, of which a part is no word of the sources."""
    spans = [span for span in _CODE.findall(text) if _NAME.fullmatch(span) and not _FILE.fullmatch(span)]
    return [span for span in spans if not words().issuperset(re.findall(r"\w+", span))]


def misplaced_names(text: str) -> list[str]:
    """Where a page says "`name` of `file`" and the file, a module of the package, does not define the name."""
    wrong = []
    for names, file in _NAMES_OF_A_FILE.findall(" ".join(text.split())):
        source = (ROOT / file).read_text(encoding="utf-8")
        for name in re.findall(r"(\w+)`", names):
            if not re.search(rf"^ *(?:(?:def|class) {name}\b|{name}\b.*[=:])", source, re.MULTILINE):
                wrong.append(f"{name} of {file}")
    return wrong


@cache
def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_kernels", ROOT / "docs" / "draw_kernels.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_has_a_page_with_its_picture_that_the_index_lists(kernel: str) -> None:
    text, index = page(kernel), (PAGES / "README.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {kernel}\n")
    assert f"](../pictures/kernels/{kernel}.svg)" in text
    assert f"](../../cuda/{KERNELS[kernel]})" in text
    assert re.search(rf"^\| `{kernel}` \|.*\| \[{kernel}\]\({kernel}\.md\) \|$", index, re.MULTILINE)


def test_every_page_and_picture_is_of_a_kernel() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} - {"README"} == set(KERNELS)
    assert {path.stem for path in PICTURES.glob("*.svg")} == set(KERNELS) | MORE_PICTURES
    assert {KERNELS[kernel] for kernel in KERNELS} == {path.name for path in (ROOT / "cuda").glob("*.cu")}


@pytest.mark.parametrize("kernel", KERNELS)
def test_constants_of_a_page_are_those_of_its_kernel(kernel: str) -> None:
    drawn = " ".join(texts((PICTURES / f"{kernel}.svg").read_text(encoding="utf-8")))
    known = set(re.findall(r"\w+", own_source(kernel)))
    assert set(_CONSTANT.findall(page(kernel) + drawn)) <= known


@pytest.mark.parametrize("name", ["README", *KERNELS])
def test_files_and_names_of_a_page_are_there(name: str) -> None:
    assert missing_files(page(name)) == []
    assert missing_names(page(name)) == []
    assert misplaced_names(page(name)) == []


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_page_says_where_its_tests_are(kernel: str) -> None:
    _, _, behind = page(kernel).partition("\n## Tests\n")
    tests = re.findall(r"`(tests/gpu/\w+\.py)`", behind)
    assert tests
    own = "\n".join((ROOT / path).read_text(encoding="utf-8") for path in tests)
    for test in re.findall(r"`(test_\w+)`", behind):
        assert f"def {test}(" in own


def test_a_page_with_a_name_that_is_gone_is_told() -> None:
    text = "`cuda/" + "gone.cu` and `kGone` in `bsrgemm/_products/heuristics.py`, `" + "no_such_" + "function`, `A @ B`"
    assert missing_files(text) == ["cuda/" + "gone.cu"]
    assert "no_such_" + "function" in missing_names(text)
    assert _CONSTANT.findall(text) == ["kGone"]
    told = misplaced_names("`gemm`, `gone` and `Problem` of\n`bsrgemm/_products/heuristics.py`")
    assert told == ["gone of bsrgemm/_products/heuristics.py"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_script_draws_the_picture_that_is_there(kernel: str, tmp_path: Path) -> None:
    assert drawing().main(["--folder", str(tmp_path), kernel]) == 0
    drawn = (tmp_path / f"{kernel}.svg").read_text(encoding="utf-8")
    kept = (PICTURES / f"{kernel}.svg").read_text(encoding="utf-8")
    assert texts(drawn) == texts(kept), f"run python docs/draw_kernels.py {kernel}"


def test_the_script_draws_the_same_bytes_every_time(tmp_path: Path) -> None:
    drawn = set()
    for _ in range(2):
        assert drawing().main(["--folder", str(tmp_path), "expand"]) == 0
        drawn.add((tmp_path / "expand.svg").read_bytes())
    assert len(drawn) == 1


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_picture_is_small_and_readable_in_print(kernel: str) -> None:
    svg = (PICTURES / f"{kernel}.svg").read_text(encoding="utf-8")
    assert len(svg.encode()) < _MOST_BYTES
    assert 'width="540pt"' in svg and "dc:date" not in svg
    assert texts(svg)
    assert min(map(float, re.findall(r"font-size: ([\d.]+)px", svg))) >= _LEAST_POINTS


def test_every_kernel_is_drawn_and_no_text_may_leave_its_box() -> None:
    module = drawing()
    assert (
        list(module.PICTURES) == list(dict.fromkeys(module.PICTURES))
        and set(module.PICTURES) == set(KERNELS) | MORE_PICTURES
    )
    picture = module.Picture(10, "a page")
    with pytest.raises(ValueError, match="does not fit"):
        picture.box(1, 4, 2, 2, "much too long for it")
    with pytest.raises(ValueError, match="leaves the picture"):
        picture.text(74, 5, "cut off")
    with pytest.raises(ValueError, match="meets"):
        picture.text(1.5, 1.6, "on the title")
