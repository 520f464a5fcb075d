"""No file of code has more than 500 lines of code, and no function of the package or of a kernel more than 80 lines.

Lines of docstrings, comments and blanks are no lines of code: explaining a thing does not make a file longer.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 500
#: Without its docstring.
MOST_LINES_OF_A_FUNCTION = 80
#: Files that were longer when the limit came to count code alone: they may shrink and not grow. No file is added here.
LONGER = {
    "cuda/attention_sm90.cu": 544,
    "cuda/decode.cu": 553,
    "cuda/gemm_sm90.cu": 579,
    "tests/array/test_block_tools.py": 549,
    "tests/array/test_host_limits.py": 514,
    "tests/array/test_host_properties.py": 507,
    "tests/products/test_refusals.py": 521,
    "tests/products/test_structure_functions.py": 513,
}

_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*")', re.DOTALL)


def docstring_of(node: ast.AST) -> range:
    """The lines of the docstring of a node."""
    if not isinstance(node, _DOCUMENTED) or ast.get_docstring(node, clean=False) is None:
        return range(0)
    return range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def lines_of_python(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {line for t in tokens if t.type not in _NO_CODE for line in range(t.start[0], t.end[0] + 1)}
    return len(code.difference(*(docstring_of(node) for node in ast.walk(ast.parse(text)))))


def lines_of_cuda(text: str) -> int:
    code = _COMMENT.sub(lambda found: found[1] or re.sub(r"[^\n]", "", found[0]), text)
    return sum(bool(line.strip()) for line in code.splitlines())


def too_long(root: Path, names: list[str]) -> dict[str, int]:
    """The files below `root` with more than `MOST_LINES` of code, and how many; what is not there has none."""
    paths = {name: root / name for name in names if (root / name).is_file()}
    count = {".py": lines_of_python, ".cu": lines_of_cuda, ".cuh": lines_of_cuda}
    texts = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    long = {name: text for name, text in texts.items() if len(text.splitlines()) > MOST_LINES}  # of anything
    lengths = {name: count[paths[name].suffix](text) for name, text in long.items()}
    return {name: lines for name, lines in lengths.items() if lines > MOST_LINES}


def test_no_file_of_code_is_too_long() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a checkout")
    command = ["git", "ls-files", "*.py", "*.cu", "*.cuh"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split()
    assert names
    found = too_long(ROOT, names)
    assert {name: lines for name, lines in found.items() if lines > LONGER.get(name, 0)} == {}
    assert LONGER.keys() - found.keys() == set(), "these are short enough now: take them out of LONGER"


def test_docstrings_comments_and_blanks_are_no_code() -> None:
    module = (
        '"""Two\nlines."""\n\n# a comment\ndef f(a=(1,\n         2)):\n    """One."""\n    return """a\n\nb"""  # c\n'
    )
    assert lines_of_python(module) == 5
    assert lines_of_cuda('// a\n\nint a;  // b\n/* c\n d */ int b;\nauto c = "// no";\n#define D  \\\n  1\n') == 5


def test_a_file_that_is_too_long_is_told(tmp_path: Path) -> None:
    for suffix, line in ((".py", "pass\n"), (".cu", "int a;\n")):
        (tmp_path / f"short{suffix}").write_text("\n" + line * MOST_LINES)
        (tmp_path / f"long{suffix}").write_text(line * (MOST_LINES + 1))
    names = [f"{name}{suffix}" for name in ("short", "long", "gone") for suffix in (".py", ".cu")]
    assert too_long(tmp_path, names) == {"long.py": MOST_LINES + 1, "long.cu": MOST_LINES + 1}


def long_functions(tree: ast.Module) -> Iterator[str]:
    """The functions with more lines than `MOST_LINES_OF_A_FUNCTION`, docstrings aside."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1 - len(docstring_of(node))
            if lines > MOST_LINES_OF_A_FUNCTION:
                yield f"{node.name} has {lines} lines"


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


def test_no_function_is_too_long() -> None:
    found = {p: [*long_functions(ast.parse(p.read_text(encoding="utf-8")))] for p in (ROOT / "bsrgemm").rglob("*.py")}
    found |= {p: [*long_cuda_functions(p.read_text(encoding="utf-8"))] for p in (ROOT / "cuda").rglob("*.cu*")}
    assert len(found) > 100 and {path.name: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("lines", [MOST_LINES_OF_A_FUNCTION, MOST_LINES_OF_A_FUNCTION + 1])
def test_a_function_that_is_too_long_is_told(lines: int) -> None:
    told = lines > MOST_LINES_OF_A_FUNCTION
    text = 'def f():\n    """Some\n\n    more."""\n' + "    pass\n" * (lines - 1)
    assert [*long_functions(ast.parse(text))] == [f"f has {lines} lines"] * told
    text = "struct Of {\n};\n\nvoid f(int a,\n       int b) {\n#pragma unroll\n" + "  a += b;\n" * (lines - 4) + "}\n"
    assert [*long_cuda_functions(text)] == [f"line 4 has {lines} lines"] * told
