"""How many small errors the tests notice: ``python -m tests.mutation --seed 1 --count 100``.

Errors are made one at a time in a copy of the tree, by rule. For each, the tests that execute the changed line run
until the first failure. An error that makes an import or a compilation fail is not counted, and another one is drawn.
Printed are those that no test noticed; some of them change no result, which only a reader can tell. With ``--at-once``
several errors are tried at a time, each in a copy of its own; the errors and what is said of them stay the same.
"""

from __future__ import annotations

import argparse
import compileall
import json
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
#: The seconds that tests may take: as many times as long as usual, and so many more. The machine may be busy.
_TIMES, _MORE = 20, 120


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


class Copy:
    """A copy of the tree in which tests run."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.asked = folder / "tree", folder / "asked"
        command = ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard"]
        for name in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
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

    def passing(self, names: list[str], wanted: set[str], workers: str) -> list[Test]:
        """The tests of some files that pass, with those of the wanted lines and kernels that they execute."""
        lines: dict[str, list[int]] = {}
        for file, _, line in (place.partition(":") for place in wanted if ":" in place):
            lines.setdefault(file, []).append(int(line))
        self.pytest({"lines": lines}, ["-n", workers, *names])
        found: dict[str, list[Any]] = {}
        for path in self.asked.parent.glob("asked.*.answer"):
            found |= json.loads(path.read_text())
        return [Test(name, seconds, frozenset(seen)) for name, (how, seconds, seen) in found.items() if how == "passed"]

    def tried(self, error: rules.Error, tests: list[Test]) -> tuple[str, str]:
        """Put one error in, run the tests, take it out again: "noticed", "survived" or "trivial", and by what."""
        path, answer = self.root / error.file, self.asked.with_suffix(".answer")
        text = path.read_text(encoding="utf-8")
        answer.unlink(missing_ok=True)
        paths = list(dict.fromkeys(test.name.split("::")[0] for test in tests))
        try:
            path.write_text(error.applied(text), encoding="utf-8")
            seconds = _MORE + _TIMES * sum(test.seconds for test in tests)
            status = self.pytest({"tests": [test.name for test in tests]}, ["-x", "-n", "0", *paths], seconds)
        finally:
            path.write_text(text, encoding="utf-8")
        found = json.loads(answer.read_text()) if answer.exists() else {}
        if status is None:
            return "noticed", "it does not end in time"
        if found.get("trivial") or not (found.get("ran") or found.get("by")):
            return "trivial", "import or compilation"
        return ("noticed", str(found["by"] or status)) if status else ("survived", f"{found['ran']} tests ran")


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="how many errors are counted")
    parser.add_argument("--paths", nargs="+", default=["bsrgemm", "cuda"], help="files and folders; default: all")
    parser.add_argument("--tests", nargs="+", help="these files of tests in place of those of the sources")
    parser.add_argument("--workers", default="auto", help="processes of pytest in the run without errors")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="errors that are tried at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where what was found is written, too")
    options = parser.parse_args(arguments)
    candidates = drawn(root, files(root, options.paths), random.Random(options.seed))
    errors = list(islice(candidates, 2 * options.count))  # some are trivial
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copies = SimpleQueue[Copy]()
        for number in range(options.at_once):
            copies.put(Copy(root, Path(folder) / str(number)))
        files_of = {file: options.tests or tests_of(root, file) for file in {error.file for error in errors}}
        wanted = {error: places(root, error) for error in errors}
        every = list(dict.fromkeys(name for names in files_of.values() for name in names))
        print(f"without errors: {len(every)} files of tests", flush=True)
        copy = copies.get()
        tests = copy.passing(every, set[str]().union(*wanted.values()), options.workers)
        if not tests:
            raise SystemExit(f"no test passes without errors: {copy.asked.with_suffix('.log').read_text()[-2000:]}")
        copies.put(copy)

        def tried(error: rules.Error) -> dict[str, Any]:
            able = [t for t in tests if t.name.split("::")[0] in files_of[error.file] and t.seen & wanted[error]]
            outcome, by, start = "survived", "no test executes it", time.monotonic()
            if able:
                copy = copies.get()
                outcome, by = copy.tried(error, ordered(able, error.file))
                copies.put(copy)
            text, seconds = (root / error.file).read_text(encoding="utf-8"), time.monotonic() - start
            old, new = (x.splitlines() for x in (text, error.applied(text)))
            difference = list(unified_diff(old, new, error.file, error.file, n=2, lineterm=""))
            return {
                "outcome": outcome, "file": error.file, "line": error.lines[0], "rule": error.rule, "by": by,
                "seconds": round(seconds, 1), "difference": difference,
            }  # fmt: skip

        with ThreadPoolExecutor(options.at_once) as pool:
            left = iter(errors)
            running = deque(pool.submit(tried, error) for error in islice(left, options.count))
            while running:
                one = running.popleft().result()
                found.append(one)
                print("{outcome}: {file}:{line}, {rule}: {by}".format_map(one), flush=True)
                if one["outcome"] == "survived":
                    print("\n".join(one["difference"]), flush=True)
                elif one["outcome"] == "trivial":
                    running.extend(pool.submit(tried, error) for error in islice(left, 1))
    outcomes = Counter(one["outcome"] for one in found)
    if options.json is not None:
        asked = {"seed": options.seed, "count": options.count, "paths": options.paths}
        options.json.write_text(json.dumps(asked | {"outcomes": outcomes, "errors": found}, indent=1))
    print(f"{outcomes['noticed'] + outcomes['survived']} errors, {outcomes['survived']} of them not noticed")
    return 1 if outcomes["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
