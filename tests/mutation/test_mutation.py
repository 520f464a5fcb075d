"""The mutation check itself: its rules make the errors they name, and it tells a good test from a weak one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest

from . import baseline, by_hand, cuda_rules, python_rules, run
from .rooms import OUTSIDE, ROOMS

PYTHON = '''
"""Not this: 1 < 2."""
from typing import Any

LIMIT = 3


def f(a: int = 1, *, strict: bool = True) -> Any:
    """Nor this: a == 1."""
    if a < LIMIT and not strict:
        raise ValueError(f"a: wanted less than {LIMIT + 1}")
    cache[a] = x = g(a, b, key=a[1:])
    return x // 2 if a else np.int32(min(x, 4))


def __repr__(self) -> str:
    return "x" * (3 - 1)
'''


def made(text: str, rules: object = python_rules) -> set[tuple[str, str]]:
    sites = rules.sites("x.py", text)  # type: ignore[attr-defined]
    return {(site.rule, site.changed_line(text)) for site in sites}


def test_python_errors_are_those_of_the_rules() -> None:
    found = made(PYTHON)
    assert {
        ("comparison", "if a <= LIMIT and not strict:"),
        ("and, or", "if a < LIMIT or not strict:"),
        ("negate a condition", "if a < LIMIT and (strict):"),
        ("drop a check", "pass"),
        ("constant", "LIMIT = 4"),
        ("drop a keyword", "cache[a] = x = g(a, b)"),
        ("swap arguments", "cache[a] = x = g(b, a, key=a[1:])"),
        ("slice", "cache[a] = x = g(a, b, key=a[1 + 1:])"),
        ("operator", "return x * 2 if a else np.int32(min(x, 4))"),
        ("dtype", "return x // 2 if a else np.int64(min(x, 4))"),
        ("opposite function", "return x // 2 if a else np.int32(max(x, 4))"),
    } <= found
    assert all(python_rules.parses(site.applied(PYTHON)) for site in python_rules.sites("x.py", PYTHON))


def test_docstrings_messages_hints_and_descriptions_stay() -> None:
    lines = PYTHON.split("\n")
    for site in python_rules.sites("x.py", PYTHON):
        line = lines[PYTHON.count("\n", 0, site.start)]
        assert "this" not in line and "def __repr__" not in line and '"x" *' not in line
        assert "ValueError" not in line or site.new == "pass"


def test_an_assignment_to_a_cache_is_dropped_and_its_value_stays() -> None:
    text = "def f():\n    x = cache[k] = make()\n"
    assert ("drop an assignment to a cache", "x = make()") in made(text)


CUDA = """
#define N (1 + 2)
// not this: a + b
template <int K, class T>
__global__ void f(const float* a, int n) {
  asm volatile("mma %0;" : "+r"(x + 1));
  static_assert(K + 1 > 2);
  for (int i = 0; i < n; ++i) sum += a[i] * 2;
  if (lane < n && !done) out[min(i, n - 1)] = sum >> 3 & 0x7;
  __syncthreads();
}
"""


def test_cuda_errors_are_those_of_the_rules() -> None:
    found = made(CUDA, cuda_rules)
    assert {
        ("comparison", "for (int i = 0; i <= n; ++i) sum += a[i] * 2;"),
        ("operator", "for (int i = 0; i < n; ++i) sum += a[i] + 2;"),
        ("constant", "for (int i = 1; i < n; ++i) sum += a[i] * 2;"),
        ("remove a guard", "if (true) out[min(i, n - 1)] = sum >> 3 & 0x7;"),
        ("negate a condition", "if (lane < n && done) out[min(i, n - 1)] = sum >> 3 & 0x7;"),
        ("min, max", "if (lane < n && !done) out[max(i, n - 1)] = sum >> 3 & 0x7;"),
        ("shift", "if (lane < n && !done) out[min(i, n - 1)] = sum << 3 & 0x7;"),
        ("mask", "if (lane < n && !done) out[min(i, n - 1)] = sum >> 3 | 0x7;"),
        ("remove a barrier", ";"),
    } <= found
    untouched = ("#define", "// not", "template", "asm", "static_assert")
    lines = [CUDA.split("\n")[CUDA.count("\n", 0, s.start)].strip() for s in cuda_rules.sites("x.cu", CUDA)]
    assert lines and not any(line.startswith(untouched) for line in lines)


def test_every_error_written_by_hand_has_its_place() -> None:
    missing = [error.what for error in by_hand.ERRORS if by_hand.place(run.ROOT, error) is None]
    assert not missing


def test_every_equivalent_error_has_a_reason_and_a_place() -> None:
    known = [*run.equivalents(), *run.listed("unnoticed")]
    missing = list(known)
    for file in (file for room in ROOMS.values() for file in room.files(run.ROOT)):
        of_file = [entry for entry in missing if fnmatch(file, entry.get("file", "*"))]
        text = (run.ROOT / file).read_text(encoding="utf-8") if of_file else ""
        for site in (python_rules if file.endswith(".py") else cuda_rules).sites(file, text):
            line = site.line(text)
            near = [x for x in of_file if x.get("line", line) == line and re.search(x.get("matches", ""), line)]
            for entry in (x for x in near if x in missing and run.is_equivalent(site, text, [x])):
                missing.remove(entry)
    assert not missing  # the rules make none of these errors
    assert all(entry["reason"].endswith(".") and {"line", "matches"} & entry.keys() for entry in known)


def test_an_error_that_only_a_card_can_notice_is_drawn_with_its_reason() -> None:
    file = "cuda/gemm_sm90.cu"
    text = (run.ROOT / file).read_text(encoding="utf-8")
    barriers = [s for s in cuda_rules.sites(file, text) if s.rule == "remove a barrier"]
    reasons = [run.reason_of(s, text, run.listed("unnoticed")) for s in barriers]
    (site,) = (s for s, reason in zip(barriers, reasons, strict=True) if reason)
    assert not run.is_equivalent(site, text, run.equivalents())


def test_an_equivalent_error_is_not_drawn() -> None:
    text = "def f(a):\n    return a < 1\n"
    site = next(s for s in python_rules.sites("bsrgemm/x.py", text) if s.rule == "comparison")
    same = {"file": "bsrgemm/*", "line": "return a < 1", "reason": "x"}
    assert run.is_equivalent(site, text, [same])
    assert run.is_equivalent(site, text, [{**same, "changed": site.changed_line(text)}])
    assert run.is_equivalent(site, text, [{**same, "above": "def f(a):", "below": ""}])
    long = f"x = 1\n{text}"
    moved = replace(site, start=site.start + 6, end=site.end + 6)
    assert run.is_equivalent(moved, long, [{**same, "above": "x = 1\ndef f(a):"}])
    assert not run.is_equivalent(moved, long, [{**same, "above": "x = 2\ndef f(a):"}])
    others = ({"file": "cuda/*"}, {"line": "return a"}, {"changed": "return a"}, {"rule": "operator"})
    for other in (*others, {"above": ""}, {"below": "x"}):
        assert not run.is_equivalent(site, text, [{**same, **other}])


def test_a_constant_is_looked_for_where_it_is_used() -> None:
    text = "LIMIT, OTHER = 3, 4\n\n\nclass A:\n    field = 2\n\n    def f(self):\n        return LIMIT\n"
    assert baseline.module_level_names(text, 1) == ["LIMIT", "OTHER"]
    assert baseline.module_level_names(text, 5) == ["field"]
    assert baseline.module_level_names(text, 8) == []


def test_the_rooms_share_the_count_and_each_has_some() -> None:
    rooms = list(ROOMS.values())
    found = run.quotas(run.ROOT, rooms, 120)
    assert sum(found.values()) == 120 and min(found.values()) >= 4
    assert all(ROOMS[name].files(run.ROOT) for name in found)


def test_every_source_belongs_to_one_room_or_is_said_to_be_outside() -> None:
    paths = (*run.ROOT.glob("bsrgemm/**/*.py"), *run.ROOT.glob("cuda/**/*.cu"), *run.ROOT.glob("cuda/**/*.cuh"))
    files = {str(path.relative_to(run.ROOT)) for path in paths}
    of_rooms = [file for room in ROOMS.values() for file in room.files(run.ROOT)]
    assert len(of_rooms) == len(set(of_rooms))
    assert {file for file in files - set(of_rooms) if not run.asked_for(file, list(OUTSIDE))} == set()
    assert not [file for file in of_rooms if run.asked_for(file, list(OUTSIDE))]


def test_errors_are_drawn_from_all_files_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = {"bsrgemm/interop/mpi/sparse.py", "bsrgemm/interop/dask/tasks.py"}
    patterns = [word for file in sorted(wanted) for word in ("--file", file)]
    run.main(["--room", "interop", "--count", "40", "--list", *patterns])
    assert {line.split()[-1].split(":")[0] for line in capsys.readouterr().out.splitlines()[::3]} == wanted
    run.main(["--room", "interop", "--count", "40", "--list", "--rule", "slice", "--rule", "dtype", *patterns])
    assert {line.split()[1] for line in capsys.readouterr().out.splitlines()[::3]} == {"slice", "dtype"}


MODULE = """
from functools import cache


def good(a, b):
    return a + b


def weak(a):
    return a if a < 10 else 10


@cache
def untested(a):
    return a + 7
"""
TESTS = """
from bsrgemm._array import module


def test_good():
    assert module.good(2, 3) == 5


def test_weak():
    assert module.weak(3) == 3


def test_fails():
    assert False
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of one module."""
    for name, text in {
        "bsrgemm/__init__.py": "",
        "bsrgemm/_array/__init__.py": "",
        "bsrgemm/_array/module.py": MODULE,
        "tests/__init__.py": "",
        "tests/array/__init__.py": "",
        "tests/array/test_module.py": TESTS,
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-n auto"\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(baseline.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


@pytest.mark.long
def test_errors_in_tested_lines_are_noticed_and_others_survive(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tree / "out.json"
    code = run.main(["--room", "array", "--kind", "rule", "--count", "30", "--json", str(kept), "--least", "0.99"])
    results = json.loads(kept.read_text())["results"]
    by_line = {(r["old"], r["new"]): r for r in results}
    good = by_line["return a + b", "return a - b"]
    assert good["outcome"] == "noticed" and good["by"] == "tests/array/test_module.py::test_good" and good["tests"] == 1
    weak = next(r for r in results if r["old"] == "return a if a < 10 else 10")
    assert weak["outcome"] == ("noticed" if "a > 10" in weak["new"] else "survived")
    assert next(r for r in results if "a + 7" in r["old"])["outcome"] == "survived"
    said = capsys.readouterr().out
    assert "left out: tests/array/test_module.py::test_fails" in said and "survived" in said
    assert code == 1 and (tree / "bsrgemm/_array/module.py").read_text() == MODULE
    (tree / "tests/array/test_more.py").write_text(
        "from bsrgemm._array import module\n\n\ndef test_untested():\n    assert module.untested(1) == 8\n"
    )
    again = tree / "again.json"
    run.main(["--again", str(kept), "--json", str(again)])
    outcomes = {r["old"]: r["outcome"] for r in json.loads(again.read_text())["results"]}
    assert outcomes["return a + 7"] == "noticed"
