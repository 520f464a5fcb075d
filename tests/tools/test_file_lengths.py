"""No file of code is longer than one can read through: 700 lines. No function of the package or of a kernel has more
than 80.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 700
#: Without its docstring.
MOST_LINES_OF_A_FUNCTION = 80


def too_long(root: Path, names: list[str]) -> dict[str, int]:
    """The files below `root` with more than `MOST_LINES`, and their lines; what is not there has none."""
    paths = {name: root / name for name in names if (root / name).is_file()}
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in paths.items()}
    return {name: lines for name, lines in lengths.items() if lines > MOST_LINES}


def test_no_file_of_code_is_too_long() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a checkout")
    command = ["git", "ls-files", "*.py", "*.cu", "*.cuh"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split()
    assert names
    assert too_long(ROOT, names) == {}


def test_a_file_that_is_too_long_is_told(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text("pass\n" * MOST_LINES)
    (tmp_path / "long.py").write_text("pass\n" * (MOST_LINES + 1))
    assert too_long(tmp_path, ["short.py", "long.py", "gone.py"]) == {"long.py": MOST_LINES + 1}


def long_functions(tree: ast.Module) -> Iterator[str]:
    """The functions with more lines than `MOST_LINES_OF_A_FUNCTION`, docstrings aside."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            described = ast.get_docstring(node) is not None
            lines = node.end_lineno - node.lineno + 1 - described * (first.end_lineno - first.lineno + 1)
            if lines > MOST_LINES_OF_A_FUNCTION:
                yield f"{node.name} has {lines} lines"


def test_no_function_of_the_package_is_too_long() -> None:
    package = ROOT / "bsrgemm"
    found = {path: [*long_functions(ast.parse(path.read_text(encoding="utf-8")))] for path in package.rglob("*.py")}
    assert found and {str(path.relative_to(ROOT)): names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("lines", [MOST_LINES_OF_A_FUNCTION, MOST_LINES_OF_A_FUNCTION + 1])
def test_a_function_that_is_too_long_is_told(lines: int) -> None:
    text = 'def f():\n    """Some\n\n    more."""\n' + "    pass\n" * (lines - 1)
    assert [*long_functions(ast.parse(text))] == [f"f has {lines} lines"] * (lines > MOST_LINES_OF_A_FUNCTION)


def long_cuda_functions(text: str) -> Iterator[str]:
    """The functions of a CUDA source, outside of structs, with more lines than `MOST_LINES_OF_A_FUNCTION`."""
    lines = text.splitlines()
    for end, line in enumerate(lines):
        if line != "}":
            continue
        begin = max(n for n in range(end) if lines[n] and not lines[n][0].isspace() and not lines[n].startswith("#"))
        while lines[begin - 1].rstrip().endswith((",", ")")) and begin:  # a signature of several lines
            begin -= 1
        if end - begin + 1 > MOST_LINES_OF_A_FUNCTION:
            yield f"line {begin + 1} has {end - begin + 1} lines"


def test_no_function_of_a_kernel_is_too_long() -> None:
    sources = [path for path in (ROOT / "cuda").rglob("*") if path.suffix in (".cu", ".cuh")]
    found = {path.name: [*long_cuda_functions(path.read_text(encoding="utf-8"))] for path in sources}
    assert len(found) > 30 and {name: places for name, places in found.items() if places} == {}


@pytest.mark.parametrize("lines", [MOST_LINES_OF_A_FUNCTION, MOST_LINES_OF_A_FUNCTION + 1])
def test_a_function_of_a_kernel_that_is_too_long_is_told(lines: int) -> None:
    text = "struct Of {\n};\n\nvoid f(int a,\n       int b) {\n#pragma unroll\n" + "  a += b;\n" * (lines - 4) + "}\n"
    found = [*long_cuda_functions(text)]
    assert found == [f"line 4 has {lines} lines"] * (lines > MOST_LINES_OF_A_FUNCTION)
