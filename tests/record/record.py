"""The record of a run on a card: how it is written, what it must say, and how a run on the stand-in compares to it."""

from __future__ import annotations

import ast
import gzip
import hashlib
import io
import json
import os
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from .log import DIGITS

ROOT = Path(__file__).parents[2]
PATH = Path(__file__).parent / "gpu_record.json"
OUTCOMES = ("passed", "skipped", "xfailed", "failed")
#: Tests of a whole record that the stand-in may leave out.
MOST_EXCUSED = 0.1
#: What every test of the suite may depend on.
_SHARED_FILES = (
    "tests/conftest.py",
    "tests/gpu/conftest.py",
    "tests/strategies.py",
    "tests/array/assembling.py",
    "tests/array/random_matrices.py",
    "tests/array/refused/__init__.py",
    "tests/array/refused/constructors.py",
    "tests/array/refused/methods.py",
    "tests/array/refused/products.py",
)
#: Said of a test that makes the same launches in other memory.
SHARING = "the same launches, but not the same ones share their memory or their stream"
_LAUNCH_FIELDS = ("grid", "block", "shared", "shared_allowed", "captured", "args")


# -------------------------------------------------------------------------------------------------- digests
def file_digest(path: Path) -> str:
    """A digest of a Python file's code: it does not change with comments, docstrings and layout."""
    return _code_digest(path.read_text())


@cache
def _code_digest(text: str) -> str:
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            for number in range(docstring.lineno - 1, docstring.end_lineno):
                lines[number] = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and lines[token.start[0] - 1]:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    words = " ".join(" ".join(lines).split())
    return hashlib.sha256(words.encode()).hexdigest()[:DIGITS]


def test_files(names: Iterable[str]) -> dict[str, str]:
    """Digests of the files that hold these tests, and of those that all tests share."""
    files = {name.partition("::")[0] for name in names} | set(_SHARED_FILES)
    files |= {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("*.py")}
    return {name: file_digest(ROOT / name) for name in sorted(files) if (ROOT / name).exists()}


def commit() -> tuple[str | None, bool]:
    """The commit of the checkout, and whether anything beside the record differs from it.

    On a machine that has the files of a commit but not its history, BSRGEMM_COMMIT names the commit.
    """
    told = os.environ.get("BSRGEMM_COMMIT")
    if told:
        return told, False
    try:
        head = _git("rev-parse", "HEAD").strip()
        changed = [line[3:] for line in _git("status", "--porcelain", "--untracked-files=no").splitlines()]
    except (OSError, subprocess.CalledProcessError):
        return None, True
    return head, any(name not in (str(path.relative_to(ROOT)) for path in (PATH, _beside(PATH))) for name in changed)


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True).stdout


# ------------------------------------------------------------------------------------------------- building
def counted(tests: Iterable[dict[str, Any]]) -> dict[str, int]:
    found = Counter(test["outcome"] for test in tests)
    return {outcome: found[outcome] for outcome in OUTCOMES}


def read_table(report: Path) -> dict[str, dict[str, Any]]:
    """The descriptions of launches that all processes of a run have left beside its report."""
    table: dict[str, dict[str, Any]] = {}
    for path in sorted(report.parent.glob(f"{report.stem}.table-*.json")):
        table |= json.loads(path.read_text())
    return table


def build(report: dict[str, Any], table: dict[str, dict[str, Any]], partial: bool) -> dict[str, Any]:
    """A record of the suite, from what the plugin has written and from nothing else."""
    tests = report.pop("tests")
    head, dirty = commit()
    counts = counted(tests)
    cut_off = report["collected"] != len(tests)
    record = {key: value for key, value in report.items() if key != "collected"}
    record |= {"commit": head, "dirty": dirty, "partial": partial or cut_off}
    record["suite"] = {"collected": report["collected"], **counts}
    record["test_files"] = test_files(test["name"] for test in tests)
    kernels: dict[tuple[str, str, str], int] = {}
    numbers: dict[str, int] = {}
    launches: list[list[Any]] = []
    entries: dict[str, dict[str, Any]] = {}
    for test in sorted(tests, key=lambda test: test["name"]):
        entry = entries[test["name"]] = {"outcome": test["outcome"]}
        if "why" in test:
            entry["why"] = test["why"]
        if test.get("checksum"):
            entry["checksum"] = test["checksum"]
        found = test.get("launches")
        if not found or not found["digest"]:
            continue
        sequence: list[Any] = []
        for name, count in _runs(found["names"]):
            if name not in numbers:
                about = table[name]
                kernel = (about["entry"], about["source"], about["options"])
                numbers[name] = len(numbers)
                packed = [kernels.setdefault(kernel, len(kernels)), *(about[field] for field in _LAUNCH_FIELDS)]
                launches.append(packed)
            sequence += [numbers[name]] if count == 1 else [[numbers[name], count]]
        entry |= {"digest": found["digest"], "sharing": found["sharing"], "kernels": found["entries"]}
        entry["launches"] = sequence
        if found["drawn"]:
            entry["drawn"] = True  # hypothesis has drawn its inputs, others in another version
    record |= {"kernels": [list(kernel) for kernel in kernels], "launches": launches, "tests": entries}
    return record


def _runs(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    for text in names:
        name, _, count = text.partition("*")
        yield name, int(count or 1)


def write(path: Path, record: dict[str, Any]) -> None:
    """As JSON with a line for each test, so that changes can be read; all launches beside it, compressed."""
    about = {key: value for key, value in record.items() if key not in ("kernels", "launches", "tests")}
    sequences = {name: test["launches"] for name, test in record["tests"].items() if "launches" in test}
    tables = {"kernels": record["kernels"], "launches": record["launches"], "tests": sequences}
    packed = gzip.compress(_json(tables).encode(), mtime=0)
    _beside(path).write_bytes(packed)
    about["launches_digest"] = hashlib.sha256(packed).hexdigest()
    about["tests"] = {
        name: {key: value for key, value in test.items() if key != "launches"} for name, test in record["tests"].items()
    }
    lines = []
    for key in sorted(about):
        value = about[key]
        if isinstance(value, dict) and value:
            inner = ",\n".join(f"{json.dumps(k)}: {_json(value[k])}" for k in sorted(value))
            lines.append(f"{json.dumps(key)}: {{\n{inner}\n}}")
        elif isinstance(value, list) and value:
            inner = ",\n".join(map(_json, value))
            lines.append(f"{json.dumps(key)}: [\n{inner}\n]")
        else:
            lines.append(f"{json.dumps(key)}: {_json(value)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _beside(path: Path) -> Path:
    """Where the launches of a record lie."""
    return path.with_name(f"{path.stem}_launches.json.gz")


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def load(path: Path = PATH) -> dict[str, Any]:
    """A record with its launches; ValueError if these are not the ones that were written with it."""
    record: dict[str, Any] = json.loads(path.read_text())
    if "launches_digest" not in record:
        return {"card": record.get("card"), "partial": True}  # of an older program: it says nothing about launches
    packed = _beside(path).read_bytes()
    if hashlib.sha256(packed).hexdigest() != record.pop("launches_digest"):
        raise ValueError(f"{_beside(path).name} does not belong to {path.name}")
    tables = json.loads(gzip.decompress(packed))
    for name, sequence in tables.pop("tests").items():
        record["tests"][name]["launches"] = sequence
    return record | tables


# ------------------------------------------------------------------------------------------- what it must say
def problems(record: dict[str, Any]) -> list[str]:
    """Why this record does not stand for a whole run of the tests as they are now; empty if it does."""
    if "tests" not in record:
        return ["the record was written by an older program"]
    suite = record["suite"]
    found = []
    if record["partial"]:
        found.append("the run was partial")
    if record["dirty"] or not record["commit"]:
        found.append("the run was not of a commit")
    if suite["failed"]:
        found.append(f"{suite['failed']} tests failed")
    outcomes = sum(suite[outcome] for outcome in OUTCOMES)
    if suite["collected"] != outcomes or outcomes != len(record["tests"]) or not suite["passed"]:
        found.append(f"{suite['collected']} tests were collected and {outcomes} have an outcome")
    if counted(record["tests"].values()) != {outcome: suite[outcome] for outcome in OUTCOMES}:
        found.append("the outcomes of the tests are not those that were counted")
    found += [f"{name} has changed since" for name in stale_files(record)]
    reports = {tool: part["errors"] for tool, part in record.get("sanitizer", {}).items()}
    found += [f"{tool} has {count} reports that are not explained" for tool, count in reports.items() if count]
    excused = record.get("stand_in", {})
    if len(excused) > MOST_EXCUSED * outcomes:
        found.append(f"the stand-in leaves out {len(excused)} of {outcomes} tests")
    return found


def retire(record: dict[str, Any], names: Iterable[str]) -> None:
    """Take tests out of a record that are not in the suite any more; their outcomes stay under `retired`."""
    for name in names:
        test = record["tests"].pop(name)
        record.setdefault("retired", {})[name] = {key: test[key] for key in ("outcome", "why") if key in test}
    record["suite"] = {"collected": len(record["tests"]), **counted(record["tests"].values())}
    held = test_files(record["tests"])
    record["test_files"] = {name: digest for name, digest in record["test_files"].items() if name in held}


def stale_files(record: dict[str, Any]) -> list[str]:
    """Files of tests that are others than those that ran."""
    now = test_files(record["tests"])
    return sorted(
        name for name in now.keys() | record["test_files"].keys() if now.get(name) != record["test_files"].get(name)
    )


def changed_checksums(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Tests whose outputs have other bits than in an earlier run with the same card and compiler."""
    if any(before.get(key) != now.get(key) for key in ("card", "nvrtc")) or "tests" not in before:
        return {}
    pairs = {
        name: (before["tests"].get(name, {}).get("checksum"), test.get("checksum"))
        for name, test in now["tests"].items()
    }
    return {name: (x, y) for name, (x, y) in pairs.items() if x and y and x != y}


# ------------------------------------------------------------------------------------------------ a sample
def features(record: dict[str, Any], test: dict[str, Any]) -> set[Any]:
    """What a test's launches have met: kernels with each of their options, and which words of arguments are what."""
    found: set[Any] = set()
    for item in test.get("launches", ()):
        launch = described(record, item[0] if isinstance(item, list) else item)
        entry = launch["entry"]
        found |= {(entry, option) for option in launch["options"].split()}
        kinds = ["@" if word[0] == "@" else "map" if word[0] == "m" else word == "0" for word in _words(launch["args"])]
        found.add((entry, "args", str(kinds), launch["captured"], launch["shared"] > 0, len(launch["grid"])))
    return found


def chosen(record: dict[str, Any], seconds: dict[str, float], budget: float) -> list[str]:
    """Tests that together cover as much as possible in the given seconds: always the one that adds most per second."""
    left_out = record["stand_in"]
    waiting = {
        name: features(record, test)
        for name, test in record["tests"].items()
        if test["outcome"] == "passed"
        and test.get("launches")
        and not (test.get("drawn") or name in left_out)
        and name in seconds
    }
    found: list[str] = []
    met: set[Any] = set()
    while waiting and budget > 0:
        for name in [name for name, new in waiting.items() if not new - met]:
            del waiting[name]
        if not waiting:
            break
        best = max(waiting, key=lambda name: len(waiting[name] - met) / (0.02 + seconds[name]))
        budget -= 0.02 + seconds[best]
        met |= waiting.pop(best)
        found.append(best)
    return sorted(found)


# ------------------------------------------------------------------------------------------------ comparing
def described(record: dict[str, Any], number: int) -> dict[str, Any]:
    """A launch of the record, field by field."""
    kernel, *fields = record["launches"][number]
    entry, source, options = record["kernels"][kernel]
    return {"entry": entry, "source": source, "options": options, **dict(zip(_LAUNCH_FIELDS, fields, strict=True))}


def sequence(record: dict[str, Any], test: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The launches of a test in order."""
    for item in test.get("launches", ()):
        number, count = item if isinstance(item, list) else (item, 1)
        for _ in range(count):
            yield described(record, number)


def difference(before: dict[str, Any], now: dict[str, Any], name: str) -> str | None:
    """The first launch of a test that is another one than in the record, field by field; None if all are the same."""
    old, new = before["tests"][name], now["tests"][name]
    if all(old.get(key) == new.get(key) for key in ("digest", "sharing")):
        return None
    pairs = [list(sequence(record, test)) for record, test in ((before, old), (now, new))]
    for place, (x, y) in enumerate(zip(*pairs, strict=False)):
        x, y = (json.loads(json.dumps(launch)) for launch in (x, y))
        if x != y:
            fields = [_field(key, x[key], y[key]) for key in x if x[key] != y[key]]
            return f"{name}: launch {place} of {x['entry']}\n  " + "\n  ".join(fields)
    lengths = [len(launches) for launches in pairs]
    if lengths[0] != lengths[1]:
        longer = pairs[lengths[0] < lengths[1]][min(lengths)]
        return f"{name}: {lengths[0]} launches in the record, {lengths[1]} now; the first beyond is {longer['entry']}"
    return f"{name}: {SHARING}"


def _field(key: str, x: Any, y: Any) -> str:
    """A field that differs; of long texts the words that differ."""
    if not isinstance(x, str):
        return f"{key}: {x} in the record, {y} now"
    if key == "source":
        return f"{key}: the CUDA source has changed ({x} in the record, {y} now)"
    if key == "options":
        sets = [set(text.split()) for text in (x, y)]
        gone, come = (" ".join(sorted(a - b)) or "nothing" for a, b in (sets, sets[::-1]))
        return f"{key}: {gone} in the record, {come} now"
    old, new = (list(_words(text)) for text in (x, y))
    places = [n for n in range(max(len(old), len(new))) if old[n : n + 1] != new[n : n + 1]]
    shown = ", ".join(
        f"word {n}: {' '.join(old[n : n + 1]) or 'nothing'} -> {' '.join(new[n : n + 1]) or 'nothing'}"
        for n in places[:6]
    )
    return f"{key}: {shown}" + (f" and {len(places) - 6} more" if len(places) > 6 else "")


def _words(text: str) -> Iterator[str]:
    """Words of arguments, runs of equal ones taken apart; a tensor map is one word."""
    inside = 0
    gathered: list[str] = []
    for part in text.split(" "):
        gathered.append(part)
        inside += part.count("(") - part.count(")")
        if inside:
            continue
        word = " ".join(gathered)
        gathered.clear()
        value, star, count = word.rpartition("*")
        yield from [value] * int(count) if star and count.isdigit() and not word.endswith(")") else [word]
