"""How many small errors the tests notice: ``python -m tests.mutation --seed 1 --count 100``.

Errors are made one at a time in a copy of the tree, by rule. For each, the tests that execute the changed line run
until the first failure. An error that makes an import or a compilation fail is not counted, and another one is drawn.
Printed are those that no test noticed; some of them change no result, which only a reader can tell. With ``--at-once``
several errors are tried at a time, each in a copy of its own; the errors and what is said of them stay the same.

First all tests run once without errors, to learn which of them execute the changed lines. ``--map FILE`` keeps what
they told, for the next run with these errors on the same sources. With ``--minutes`` a run ends in time: errors that
were not tried are not counted, and FILE of ``--json`` has at each moment what is known.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import math
import os
import py_compile
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from difflib import unified_diff
from fnmatch import fnmatch
from functools import cache
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from bsrgemm._kernels import jit

from . import rules

ROOT = Path(__file__).resolve().parents[2]
#: What people run and read, and instructions of the card, which the emulator exchanges: no error is made there.
OUTSIDE = ("bsrgemm/_cli/*", "bsrgemm/_environment.py", "bsrgemm/_version.py", "*/__main__.py", "*/__init__.py",
           "cuda/ptx/*")  # fmt: skip
#: The tests that can notice an error in a folder or a file; in any other: those of what stands on it.
TESTS = {
    "bsrgemm/_array/": ("tests/array", "tests/scipy_suite"),
    "bsrgemm/_products/": ("tests/products", "tests/array", "tests/kernels"),
    "bsrgemm/_attention/": ("tests/attention", "tests/kernels"),
    "bsrgemm/_kernels/": ("tests/kernels", "tests/products", "tests/attention"),
    "bsrgemm/_kernel_index.py": ("tests/kernels", "tests/tools"),
    "bsrgemm/_plotting.py": ("tests/plotting", "tests/array"),
    "bsrgemm/linalg/": ("tests/linalg",),
    "bsrgemm/interop/": ("tests/interop",),
    "cuda/": ("tests/kernels", "tests/emulator"),
    "": ("tests/products", "tests/array", "tests/attention", "tests/linalg", "tests/kernels"),
}
#: Compiles, hashes or reads the sources without executing them.
NEVER = "tests/kernels/test_compile.py"
#: The seconds that tests may take: so many, and so many more than many times as long as usual. The machine may be busy.
_TIMES, _MORE, _MOST_MORE = 20, 120, 480
#: Of the minutes of a run, the part that the tests without errors may take.
_FOR_THE_MAP = 0.6


def allowed(tests: list[Test]) -> float:
    """The seconds that tests may take with an error in the package."""
    usual = sum(test.seconds for test in tests)
    return _MORE + max(3 * usual, min(_TIMES * usual, _MOST_MORE))


@dataclass(frozen=True)
class Test:
    """A test that passes without errors, and what it executes: "file:line", and sources of kernels."""

    name: str
    seconds: float
    seen: frozenset[str]


def files(root: Path, paths: list[str]) -> list[str]:
    """The sources below some paths in which errors are made."""
    found = {str(p.relative_to(root)) for kind in ("bsrgemm/**/*.py", "cuda/**/*.cu*") for p in root.glob(kind)}
    asked = {file for file in found if any(file == path or file.startswith(f"{path.rstrip('/')}/") for path in paths)}
    return sorted(file for file in asked if not any(fnmatch(file, pattern) for pattern in OUTSIDE))


def drawn(root: Path, names: list[str], rng: random.Random) -> Iterator[rules.Error]:
    """Errors without end: a rule, then a place, each line once until there are no others."""
    texts = {name: (root / name).read_text(encoding="utf-8") for name in names}
    by_rule: dict[str, list[rules.Error]] = {}
    for error in (error for name, text in texts.items() for error in rules.errors(name, text)):
        by_rule.setdefault(error.rule, []).append(error)
    for errors in by_rule.values():
        rng.shuffle(errors)
    used = set[tuple[str, int]]()
    while by_rule:
        rule = rng.choice(sorted(by_rule))
        error = by_rule[rule].pop()
        if not by_rule[rule]:
            del by_rule[rule]
        place = (error.file, texts[error.file].count("\n", 0, error.start))
        if place not in used and (error.file.startswith("cuda/") or rules.parses(error.applied(texts[error.file]))):
            used.add(place)
            yield error


def tests_of(root: Path, file: str) -> list[str]:
    """The files of tests that can notice an error in a source, its own doctests first."""
    folders = next(tests for start, tests in TESTS.items() if file.startswith(start))
    own = [file] if file.endswith(".py") and ">>> " in (root / file).read_text(encoding="utf-8") else []
    found = [path for folder in folders for path in (root / folder).rglob("test_*.py")]
    return own + sorted(name for p in found if (name := str(p.relative_to(root))) != NEVER)


def places(root: Path, error: rules.Error) -> set[str]:
    """What a test executes if the error can matter to it: lines, or kernels."""
    if error.file.startswith("cuda/"):
        return {source for source, included in _kernels(root).items() if error.file in included}
    return {f"{error.file}:{line}" for line in range(error.lines[0], error.lines[1] + 1)}


@cache
def _kernels(root: Path) -> dict[str, set[str]]:
    """Every CUDA source with all that it includes, itself too."""
    folder = root / "cuda"
    return {f"cuda/{p.name}": {f"cuda/{x}" for x in jit.gather(p.name, folder)} for p in folder.glob("*.cu")}


def ordered(tests: list[Test], file: str) -> list[Test]:
    """One case of each test function first, quick ones before slow ones; files with the module's name come first."""
    ranked = sorted(tests, key=lambda t: (Path(file).stem not in t.name.split("::")[0] or t.seconds > 1, t.seconds))
    first = {t.name.split("[")[0]: t.name for t in reversed(ranked)}
    return sorted(ranked, key=lambda t: t.name != first[t.name.split("[")[0]])


def tree(root: Path) -> list[str]:
    """The files of the tree: those that git knows, or all that are not hidden where there is no repository."""
    command = ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return sorted(str(path) for path in found if not any(x[0] == "." or x == "__pycache__" for x in path.parts))


def digest(root: Path) -> str:
    """What the tests and all that they test are made of."""
    names = sorted(name for name in tree(root) if name.startswith(("bsrgemm/", "cuda/", "tests/")))
    parts = (name.encode() + (root / name).read_bytes() for name in names if (root / name).is_file())
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


@dataclass(frozen=True)
class Map:
    """The tests that pass without errors, and by what they execute; whether all of them ran."""

    tests: list[Test]
    complete: bool

    @classmethod
    def read(cls, file: Path | None, root: Path, wanted: set[str], every: list[str]) -> Map | None:
        """What an earlier run has written, if it holds for these sources, lines and files of tests."""
        if file is None or not file.exists():
            return None
        found = json.loads(file.read_text())
        if (
            found["digest"] != digest(root)
            or not wanted <= set(found["wanted"])
            or not set(every) <= set(found["files"])
        ):
            return None
        return cls([Test(name, seconds, frozenset(seen)) for name, seconds, seen in found["tests"]], True)

    def write(self, file: Path, root: Path, wanted: set[str], every: list[str]) -> None:
        tests = [(test.name, test.seconds, sorted(test.seen)) for test in self.tests]
        about = {"digest": digest(root), "wanted": sorted(wanted), "files": every, "tests": tests}
        file.write_text(json.dumps(about))


class Copy:
    """A copy of the tree in which tests run."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.asked = folder / "tree", folder / "asked"
        for name in tree(root):
            if (root / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.root / name)
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(self.root / "bsrgemm", quiet=2, invalidation_mode=mode)

    def pytest(self, asked: dict[str, object], args: list[str], seconds: float | None = None) -> int | None:
        """The status of pytest, None if it did not end in time; what it found is beside the file `asked`."""
        self.asked.write_text(json.dumps(asked))
        environment = os.environ | {"BSRGEMM_MUTATION": str(self.asked), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"PYTHONPATH": f"{self.root}", "OPENBLAS_NUM_THREADS": "1"}
        options = "addopts=--doctest-modules -p no:cacheprovider -p tests.mutation.noticing"
        command, log = [sys.executable, "-m", "pytest", "-o", options, *args], self.asked.with_suffix(".log").open("w")
        process = subprocess.Popen(command, cwd=self.root, env=environment, stdout=log, stderr=log, process_group=0)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def passing(self, names: list[str], wanted: set[str], workers: str, seconds: float | None) -> Map:
        """The tests of some files that pass, with those of the wanted lines and kernels that they execute."""
        lines: dict[str, list[int]] = {}
        for file, _, line in (place.partition(":") for place in wanted if ":" in place):
            lines.setdefault(file, []).append(int(line))
        status = self.pytest({"lines": lines}, ["-n", workers, *names], seconds)
        found: dict[str, list[Any]] = {}
        for path in self.asked.parent.glob("asked.*.answer"):
            found |= json.loads(path.read_text())
        tests = [Test(name, took, frozenset(seen)) for name, (how, took, seen) in found.items() if how == "passed"]
        return Map(tests, status is not None)

    def tried(self, error: rules.Error, tests: list[Test], left: float) -> tuple[str, str]:
        """Put one error in, run the tests, take it out again: the outcome, and by what.

        It is "noticed", "survived", "trivial", or "untried" if so many seconds are too few.
        """
        path, answer = self.root / error.file, self.asked.with_suffix(".answer")
        text = path.read_text(encoding="utf-8")
        answer.unlink(missing_ok=True)
        paths = list(dict.fromkeys(test.name.split("::")[0] for test in tests))
        try:
            path.write_text(error.applied(text), encoding="utf-8")
            seconds = min(allowed(tests), max(1.0, left))
            status = self.pytest({"tests": [test.name for test in tests]}, ["-x", "-n", "0", *paths], seconds)
        finally:
            path.write_text(text, encoding="utf-8")
        found = json.loads(answer.read_text()) if answer.exists() else {}
        if status is None:
            return ("untried", "no time left") if seconds < allowed(tests) else ("noticed", "it does not end in time")
        if found.get("trivial") or not (found.get("ran") or found.get("by")):
            return "trivial", "import or compilation"
        return ("noticed", str(found["by"] or status)) if status else ("survived", f"{found['ran']} tests ran")


class Run:
    """Errors that are tried one after the other, some at a time, and what is found."""

    def __init__(self, root: Path, options: argparse.Namespace, errors: list[rules.Error]) -> None:
        self.root, self.options, self.errors = root, options, errors
        self.end = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
        self.files_of = {file: options.tests or tests_of(root, file) for file in {error.file for error in errors}}
        self.wanted = {error: places(root, error) for error in errors}
        self.found: list[dict[str, Any]] = []
        self.copies = SimpleQueue[Copy]()
        self.map = Map([], True)

    def left(self) -> float:
        """The seconds that are left."""
        return self.end - time.monotonic()

    def learn(self) -> None:
        """Find the tests of all errors, from a file or by running the tests without errors."""
        every = list(dict.fromkeys(name for names in self.files_of.values() for name in names))
        wanted, file = set[str]().union(*self.wanted.values()), self.options.map
        known = Map.read(file, self.root, wanted, every)
        if known is not None:
            self.map = known
            print(f"without errors: {len(known.tests)} tests pass, as {file} says", flush=True)
            return
        print(f"without errors: {len(every)} files of tests", flush=True)
        start, copy = time.monotonic(), self.copies.get()
        seconds = None if math.isinf(self.end) else _FOR_THE_MAP * self.left()
        self.map = copy.passing(every, wanted, self.options.workers, seconds)
        if not self.map.tests and self.map.complete:
            raise SystemExit(f"no test passes without errors: {copy.asked.with_suffix('.log').read_text()[-2000:]}")
        self.copies.put(copy)
        took, rest = time.monotonic() - start, "" if self.map.complete else "; the time was too short for the others"
        print(f"without errors: {len(self.map.tests)} tests pass, in {took:.0f} s{rest}", flush=True)
        if file is not None and self.map.complete:
            self.map.write(file, self.root, wanted, every)

    def tried(self, error: rules.Error) -> dict[str, Any]:
        """What becomes of an error."""
        files, lines, start = self.files_of[error.file], self.wanted[error], time.monotonic()
        able = [t for t in self.map.tests if t.name.split("::")[0] in files and t.seen & lines]
        outcome, by = ("survived", "no test executes it") if self.map.complete else ("untried", "its tests did not run")
        if self.left() <= 0:
            outcome, by = "untried", "no time left"
        elif able:
            copy = self.copies.get()
            outcome, by = copy.tried(error, ordered(able, error.file), self.left())
            self.copies.put(copy)
        text, seconds = (self.root / error.file).read_text(encoding="utf-8"), time.monotonic() - start
        old, new = (x.splitlines() for x in (text, error.applied(text)))
        difference = list(unified_diff(old, new, error.file, error.file, n=2, lineterm=""))
        return {
            "outcome": outcome, "file": error.file, "line": error.lines[0], "rule": error.rule, "by": by,
            "seconds": round(seconds, 1), "difference": difference,
        }  # fmt: skip

    def all(self) -> None:
        """Try as many errors as are counted, and another one for each that is trivial."""
        with ThreadPoolExecutor(self.options.at_once) as pool:
            left = iter(self.errors)
            running = deque(pool.submit(self.tried, error) for error in islice(left, self.options.count))
            while running:
                one = running.popleft().result()
                self.found.append(one)
                print("{outcome}: {file}:{line}, {rule}: {by}".format_map(one), flush=True)
                if one["outcome"] == "survived":
                    print("\n".join(one["difference"]), flush=True)
                elif one["outcome"] == "trivial":
                    running.extend(pool.submit(self.tried, error) for error in islice(left, 1))
                self.write()

    def outcomes(self) -> Counter[str]:
        return Counter(one["outcome"] for one in self.found)

    def write(self) -> None:
        """Write what is known by now."""
        if self.options.json is not None:
            asked = {"seed": self.options.seed, "count": self.options.count, "paths": self.options.paths}
            known = {"outcomes": self.outcomes(), "score": self.score(), "errors": self.found}
            self.options.json.write_text(json.dumps(asked | known, indent=1))

    def score(self) -> float | None:
        """The part of the errors that were noticed, in percent; None if none was tried."""
        outcomes = self.outcomes()
        tried = outcomes["noticed"] + outcomes["survived"]
        return round(100 * outcomes["noticed"] / tried, 1) if tried else None


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="how many errors are counted")
    parser.add_argument("--paths", nargs="+", default=["bsrgemm", "cuda"], help="files and folders; default: all")
    parser.add_argument("--tests", nargs="+", help="these files of tests in place of those of the sources")
    parser.add_argument("--workers", default="auto", help="processes of pytest in the run without errors")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="errors that are tried at a time")
    parser.add_argument("--minutes", type=float, metavar="M", help="the run ends then; default: with the last error")
    parser.add_argument("--map", type=Path, metavar="FILE", help="keeps which tests execute the changed lines")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where what was found is written, too")
    options = parser.parse_args(arguments)
    candidates = drawn(root, files(root, options.paths), random.Random(options.seed))
    run = Run(root, options, list(islice(candidates, 2 * options.count)))  # some are trivial
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        for number in range(options.at_once):
            run.copies.put(Copy(root, Path(folder) / str(number)))
        run.learn()
        run.all()
    outcomes = run.outcomes()
    untried = f", {outcomes['untried']} more were not tried" if outcomes["untried"] else ""
    tried = outcomes["noticed"] + outcomes["survived"]
    print(f"{tried} errors, {outcomes['survived']} of them not noticed: {run.score()} % noticed{untried}")
    return 1 if outcomes["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
