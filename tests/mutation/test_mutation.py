"""The errors are those of the rules, and good tests are told from weak ones."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from . import rules
from .__main__ import NEVER, OUTSIDE, ROOT, files, main
from .__main__ import TESTS as TESTS_OF

PYTHON = '''
LIMIT = 3


def f(a: int = 1) -> Any:
    """Not this: a == 1."""
    if a < LIMIT and not strict:
        raise ValueError(f"a: wanted less than {LIMIT + 1}")
    x = cache[a] = g(a, b, key=a[1:])
    return x // 2 if a else np.int32(min(x, 4))
'''
OF_PYTHON = """if a <= LIMIT and not strict:|if a < LIMIT or not strict:|if a < LIMIT and (strict):|pass|LIMIT = 4
x = cache[a] = g(a, b)|x = cache[a] = g(b, a, key=a[1:])|x = cache[a] = g(a, b, key=a[1 + 1:])
x = g(a, b, key=a[1:])|return x * 2 if a else np.int32(min(x, 4))|return x // 2 if a else np.int64(min(x, 4))"""
CUDA = """
// not this: a + b
  for (int i = 0; i < n; ++i) sum += a[i] * 2;
  if (lane < n && !done) out[min(i, n - 1)] = sum >> 3;
  __syncthreads();
"""
OF_CUDA = """for (int i = 0; i <= n; ++i) sum += a[i] * 2;|for (int i = 1; i < n; ++i) sum += a[i] * 2;|;
if (true) out[min(i, n - 1)] = sum >> 3;|if (lane < n && done) out[min(i, n - 1)] = sum >> 3;
if (lane < n && !done) out[max(i, n - 1)] = sum >> 3;|if (lane < n && !done) out[min(i, n - 1)] = sum << 3;"""


@pytest.mark.parametrize(("file", "text", "wanted"), [("x.py", PYTHON, OF_PYTHON), ("x.cu", CUDA, OF_CUDA)])
def test_errors_are_those_of_the_rules(file: str, text: str, wanted: str) -> None:
    found = set()
    for error in rules.errors(file, text):
        line = text.count("\n", 0, error.start)
        assert "ot this" not in text.split("\n")[line] and error.applied(text) != text
        found.add(error.applied(text).split("\n")[line].strip())
    assert set(wanted.replace("\n", "|").split("|")) <= found


def test_the_tables_name_what_is_there() -> None:
    """Folders and files that have moved would leave errors to tests that never see them."""
    assert [path for path in (*TESTS_OF, *sum(TESTS_OF.values(), ()), NEVER) if not (ROOT / path).exists()] == []
    assert [pattern for pattern in OUTSIDE if not any(ROOT.glob(pattern.replace("*/", "**/")))] == []
    assert {file.split("/")[0] for file in files(ROOT, ["bsrgemm", "cuda"])} == {"bsrgemm", "cuda"}


MODULE = """
def good(a, b):
    return a + b


def weak(a):
    return a if a < 10 else 10


def untested(a):
    return a + 7
"""
TESTS = """
from bsrgemm import module

def test_good():
    assert module.good(2, 3) == 5 and module.weak(3) == 3
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small package with its tests."""
    plugin = {f"tests/mutation/{p.name}": p.read_text() for p in Path(__file__).parent.glob("[!t]*.py")}
    texts = {"bsrgemm/module.py": MODULE, "tests/test_module.py": TESTS, "tests/__init__.py": "", "pyproject.toml": ""}
    for name, text in (texts | {"bsrgemm/__init__.py": ""} | plugin).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


ASKED = ["--count", "9", "--tests", "tests/test_module.py", "--workers", "0"]


@pytest.mark.parametrize("at_once", ["1", "2"])
def test_errors_in_tested_lines_are_noticed_and_others_survive(at_once: str, tree: Path, capsys: Any) -> None:
    subprocess.run(["git", "init", "-q", tree], check=True)
    assert main([*ASKED, "--at-once", at_once, "--json", str(tree / "found.json")], tree) == 1
    said = capsys.readouterr().out
    assert "noticed: bsrgemm/module.py:3, operator: tests/test_module.py::test_good" in said
    assert "survived: bsrgemm/module.py:11, operator: no test executes it" in said
    assert "survived: bsrgemm/module.py:7, " in said and said.endswith(
        "3 errors, 2 of them not noticed: 33.3 % noticed\n"
    )
    found = json.loads((tree / "found.json").read_text())
    assert [x["outcome"] for x in found["errors"]].count("survived") == found["outcomes"]["survived"] == 2
    assert all(f"{x['outcome']}: {x['file']}:{x['line']}, {x['rule']}: {x['by']}\n" in said for x in found["errors"])


def test_a_run_ends_in_time_and_says_what_it_knows(tree: Path, capsys: Any) -> None:
    """Here there is no repository, as where a tree was copied to."""
    assert main([*ASKED, "--minutes", "0.0001", "--json", str(tree / "found.json")], tree) == 0
    assert capsys.readouterr().out.endswith("0 errors, 0 of them not noticed: None % noticed, 3 more were not tried\n")
    found = json.loads((tree / "found.json").read_text())
    assert found["outcomes"] == {"untried": 3} and found["score"] is None


def test_what_tests_execute_is_remembered_for_the_same_sources(tree: Path, tmp_path: Path, capsys: Any) -> None:
    asked = [*ASKED, "--map", str(tmp_path / "map.json")]
    for text, remembered in (("", False), ("", True), ("# another source", False)):
        (tree / "bsrgemm/module.py").write_text(MODULE + text)
        assert main(asked, tree) == 1
        said = capsys.readouterr().out
        assert ("1 tests pass, as " in said) == remembered and said.endswith("33.3 % noticed\n")
