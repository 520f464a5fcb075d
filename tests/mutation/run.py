"""How many small errors the tests notice: ``python -m tests.mutation.run --seed 1 --count 120``.

Errors are made one at a time in a copy of the tree, by rule (`python_rules`, `cuda_rules`) and from a list written by
hand (`by_hand`). For each, the tests of its room that execute the changed line run until the first failure. An error
that makes an import or a compilation fail is trivial: it is not counted, and another one is drawn. Errors that change
no result are listed in `equivalent/`, and so are those that only a card can notice: these are drawn and counted.
"""

from __future__ import annotations

import argparse
import compileall
import difflib
import importlib.util
import json
import os
import py_compile
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from . import baseline, by_hand, cuda_rules, python_rules
from .rooms import ROOMS, Room
from .sites import Site

ROOT = Path(__file__).resolve().parents[2]
#: How many times as many errors are drawn as are counted, at most: some are trivial.
_SPARE = 4
_UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH


@dataclass
class Result:
    """What became of one error."""

    room: str
    file: str
    line: int
    rule: str
    old: str
    new: str
    diff: str
    #: "noticed", "timeout", "survived" or "trivial"
    outcome: str
    by: str | None
    tests: int
    seconds: float


class Copy:
    """A copy of the tree with a process that runs tests in it."""

    def __init__(self, root: Path) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="mutation-"))
        for name in tracked(root):
            if (root / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.root / name)
        compileall.compile_dir(self.root / "bsrgemm", quiet=2, invalidation_mode=_UNCHECKED)
        # The worker of the tree itself: a copy may have an older one.
        command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
        pipe = subprocess.PIPE
        # Threads of BLAS that wait for each other take most of the time where cores are shared.
        environment = {"OPENBLAS_NUM_THREADS": "1", **os.environ}
        self.process = subprocess.Popen(command, cwd=self.root, stdin=pipe, stdout=pipe, text=True, env=environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        shutil.rmtree(self.root, ignore_errors=True)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer to a request."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the process that runs the tests has ended")
        return dict(json.loads(line))

    def try_out(self, site: Site, room: Room, known: baseline.Baseline, options: argparse.Namespace) -> Result:
        """Put one error in, run the tests that can notice it, and take it out again."""
        path = self.root / site.file
        text = path.read_text(encoding="utf-8")
        changed = site.applied(text)
        likely, others = known.selected(site, text, room.test_files(self.root))
        began = time.monotonic()
        outcome, by, ran = "survived", None, 0
        path.write_text(changed, encoding="utf-8")
        if site.file.endswith(".py"):
            Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
        try:
            for tests in (likely, others if options.thorough or not likely else []):
                if not tests:
                    continue
                answer = self.ask(self.request(site, tests, options.seconds))
                ran += answer.get("ran", 0)
                outcome, by = _OUTCOMES[answer["outcome"]], answer.get("by")
                if outcome != "survived":
                    break
            if outcome == "survived":
                by = reason_of(site, text, listed("unnoticed"))
        finally:
            path.write_text(text, encoding="utf-8")
            if site.file.endswith(".py"):
                py_compile.compile(str(path), invalidation_mode=_UNCHECKED)
        lines = [x.splitlines(keepends=True) for x in (text, changed)]
        diff = "".join(difflib.unified_diff(*lines, site.file, site.file, n=2))
        number = text.count("\n", 0, site.start) + 1
        seconds = round(time.monotonic() - began, 1)
        lines_of = (site.line(text), site.changed_line(text))
        return Result(room.name, site.file, number, site.rule, *lines_of, diff, outcome, by, ran, seconds)

    def request(self, site: Site, tests: list[baseline.Test], most: float) -> dict[str, Any]:
        python = site.file.endswith(".py")
        return {
            "import": site.file.removesuffix(".py").replace("/", ".") if python else None,
            "tests": [t.id for t in tests],
            "limits": {t.id: t.seconds for t in tests if t.seconds > 1},
            "order": True,
            # More than the worker allows to a single test, or one that never ends would count as not reached.
            "seconds": min(most, 240 + 20 * sum(t.seconds for t in tests)),
        }


_OUTCOMES = {"failed": "noticed", "passed": "survived", "timeout": "timeout", "trivial": "trivial"}


def tracked(root: Path) -> list[str]:
    """The files of the tree that git knows or would add; without git all of the folders that tests need."""
    command = ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found = [
        p for name in ("bsrgemm", "cuda", "tests") for p in (root / name).rglob("*") if "__pycache__" not in p.parts
    ]
    return [str(p.relative_to(root)) for p in (*found, root / "pyproject.toml") if p.is_file()]


# -------------------------------------------------------------------------------- what is drawn
def listed(kind: str) -> list[dict[str, str]]:
    """Errors of the lists in `equivalent/` with the reason: "equivalent" or "unnoticed"."""
    lists = sorted(Path(__file__).with_name("equivalent").glob("*.toml"))
    return [entry for path in lists for entry in tomllib.loads(path.read_text(encoding="utf-8")).get(kind, [])]


def equivalents() -> list[dict[str, str]]:
    """Errors that change no result, with the reason."""
    return listed("equivalent")


def is_equivalent(site: Site, text: str, known: list[dict[str, str]]) -> bool:
    """Is this error listed as one that changes no result?"""
    return reason_of(site, text, known) is not None


def reason_of(site: Site, text: str, known: list[dict[str, str]]) -> str | None:
    """The reason of the first entry that lists this error."""
    line, changed = site.line(text), site.changed_line(text)
    lines, number = [x.strip() for x in text.split("\n")], text.count("\n", 0, site.start)
    above, below = "\n".join(["", *lines[:number]]), "\n".join([*lines[number + 1 :], ""])
    found = (
        entry["reason"]
        for entry in known
        if fnmatch(site.file, entry.get("file", "*"))
        and entry.get("rule", site.rule) == site.rule
        and entry.get("line", line) == line
        and ("above" not in entry or above.endswith("\n" + entry["above"]))
        and ("below" not in entry or below.startswith(entry["below"] + "\n"))
        and entry.get("changed", changed) == changed
        and re.search(entry.get("matches", ""), line) is not None
    )
    return next(found, None)


def asked_for(file: str, patterns: list[str]) -> bool:
    """Does one of these patterns match a file?"""
    return any(fnmatch(file, pattern) for pattern in patterns)


def by_rule(root: Path, room: Room, rng: random.Random, options: argparse.Namespace) -> Iterator[Site]:
    """Errors in a room without end: a rule, then a place, each line once until there are no others."""
    known, found = equivalents(), {}
    for file in room.files(root):
        if asked_for(file, options.file):
            text = (root / file).read_text(encoding="utf-8")
            sites = (python_rules if file.endswith(".py") else cuda_rules).sites(file, text)
            for site in sites:
                if not options.rule or site.rule in options.rule:
                    found.setdefault(site.rule, []).append((site, text))
    used: set[tuple[str, int]] = set()
    rules = sorted(found)
    for sites in found.values():
        rng.shuffle(sites)
    while rules:
        rule = rng.choice(rules)
        if not found[rule]:
            rules.remove(rule)
            continue
        site, text = found[rule].pop()
        place = (site.file, text.count("\n", 0, site.start))
        if place in used or is_equivalent(site, text, known):
            continue
        if site.file.endswith(".py") and not python_rules.parses(site.applied(text)):
            continue
        used.add(place)
        yield site


def drawn(root: Path, room: Room, rng: random.Random, count: int, options: argparse.Namespace) -> Iterator[Site]:
    """Errors of a room: some of those written by hand, then by rule."""
    written = [s for s in by_hand.sites(root) if s.file in room.files(root) and asked_for(s.file, options.file)]
    rng.shuffle(written)
    if options.kind == "both":
        written = written[: count // 4]
    if options.kind != "rule":
        yield from written
    if options.kind != "hand":
        yield from by_rule(root, room, rng, options)


def quotas(root: Path, rooms: list[Room], count: int) -> dict[str, int]:
    """How many errors each room gets: by its lines, no room less than a few."""
    lines = {r.name: sum(len((root / f).read_text(encoding="utf-8").split("\n")) for f in r.files(root)) for r in rooms}
    lines = {name: n for name, n in lines.items() if n}
    total = sum(lines.values())
    least = max(1, min(4, count // max(1, len(lines))))
    found = {name: max(least, count * n // total) for name, n in lines.items()}
    largest = max(found, key=lambda name: found[name])
    found[largest] = max(1, found[largest] + count - sum(found.values()))
    return found


# -------------------------------------------------------------------------------- the report
def table(results: list[Result]) -> str:
    """A line for each room."""
    names = list(dict.fromkeys(r.room for r in results))
    out = [f"{'room':<12}{'made':>6}{'noticed':>9}{'timeout':>9}{'survived':>10}{'score':>8}"]
    for name in [*names, "all"]:
        kinds = Counter(r.outcome for r in results if name in (r.room, "all"))
        made = kinds["noticed"] + kinds["timeout"] + kinds["survived"]
        share = (made - kinds["survived"]) / max(1, made)
        out.append(f"{name:<12}{made:>6}{kinds['noticed']:>9}{kinds['timeout']:>9}{kinds['survived']:>10}{share:>8.1%}")
    return "\n".join(out)


def score(results: list[Result]) -> float:
    """The share of errors that were noticed; a test that never ends was."""
    made = [r for r in results if r.outcome != "trivial"]
    return sum(r.outcome != "survived" for r in made) / max(1, len(made))


def commit(root: Path) -> str:
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return "unknown"


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=120, help="errors of all rooms together that are counted")
    parser.add_argument(
        "--room", action="append", choices=sorted(ROOMS), help="may be given several times; all by default"
    )
    parser.add_argument(
        "--file", action="append", help="only in files that match this pattern; may be given several times"
    )
    parser.add_argument("--rule", action="append", help="only errors of this rule; may be given several times")
    parser.add_argument("--tests", action="append", help="these tests instead of those of the room")
    parser.add_argument("--kind", choices=("both", "rule", "hand"), default="both")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=900, help="the most that one error may take")
    parser.add_argument(
        "--thorough", action="store_true", help="of survivors run the tests too that do not pass by the line"
    )
    parser.add_argument("--least", type=float, default=0.0, help="exit with 1 below this score")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", type=Path, help="only the survivors of this earlier JSON file")
    parser.add_argument("--list", action="store_true", help="print what would be tried, and run nothing")
    return parser.parse_args(arguments)


def say(text: str) -> None:
    print(text, flush=True)


def again(root: Path, path: Path) -> dict[str, list[Site]]:
    """The survivors of an earlier run that can still be made, by room."""
    found: dict[str, list[Site]] = {}
    for entry in json.loads(path.read_text())["results"]:
        if entry["outcome"] != "survived" or not (root / entry["file"]).is_file():
            continue
        text = (root / entry["file"]).read_text(encoding="utf-8")
        sites = (python_rules if entry["file"].endswith(".py") else cuda_rules).sites(entry["file"], text)
        wanted = (entry["rule"], entry["old"], entry["new"])
        same = [s for s in (*sites, *by_hand.sites(root)) if (s.rule, s.line(text), s.changed_line(text)) == wanted]
        near = sorted((s for s in same if s.file == entry["file"]), key=lambda s: abs(s.first_line - entry["line"]))
        if near and not is_equivalent(near[0], text, equivalents()):
            found.setdefault(entry["room"], []).append(near[0])
        elif not near:
            say(f"cannot be made any more: {entry['file']}: {entry['old']}")
    return found


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    options.file = options.file or ["*"]
    rooms = {name: ROOMS[name] for name in options.room or ROOMS}
    if options.tests:
        rooms = {name: replace(room, tests=tuple(options.tests)) for name, room in rooms.items()}
    # All are drawn now: the tree may change while this runs.
    if options.again is not None:
        sites = {name: found for name, found in again(ROOT, options.again).items() if name in rooms}
        wanted = {name: len(found) for name, found in sites.items()}
    else:
        wanted = quotas(ROOT, list(rooms.values()), options.count)
        sites = {}
        for name, count in wanted.items():
            rng = random.Random(f"{options.seed} {name}")
            sites[name] = list(islice(drawn(ROOT, rooms[name], rng, count, options), _SPARE * count))
    if options.list:
        for name, count in wanted.items():
            for site in sites[name][:count]:
                text = (ROOT / site.file).read_text(encoding="utf-8")
                say(f"{name:<10} {site.rule:<20} {site.file}:{site.first_line}")
                say(f"  - {site.line(text)}\n  + {site.changed_line(text)}")
        return 0
    results: list[Result] = []
    with ExitStack() as stack:
        copies = [stack.enter_context(Copy(ROOT)) for _ in range(options.jobs)]
        pool = stack.enter_context(ThreadPoolExecutor(options.jobs))
        for name, count in wanted.items():
            for result in tried(rooms[name], sites[name], count, copies, pool, options):
                results.append(result)
                if options.json is not None:
                    write(options.json, options, results)
    say("\n" + table(results))
    survivors = [r for r in results if r.outcome == "survived"]
    if survivors:
        say("\nSurvivors:\n" + "\n".join(r.diff for r in survivors))
    return int(score(results) < options.least)


def tried(
    room: Room,
    sites: list[Site],
    count: int,
    copies: list[Copy],
    pool: ThreadPoolExecutor,
    options: argparse.Namespace,
) -> Iterator[Result]:
    """The results of so many errors of a room; for each that is trivial another one is taken."""
    first = copies[0]
    known = baseline.measured(first.root, room.test_files(first.root), first.ask, say)
    for failing in known.failing:
        say(f"fails without any error, left out: {failing}")
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def one(site: Site) -> Result:
        copy = free.get()
        try:
            return copy.try_out(site, room, known, options)
        finally:
            free.put(copy)

    stream, counted = iter(sites), 0
    while some := list(islice(stream, count - counted)):
        for result in pool.map(one, some):
            counted += result.outcome != "trivial"
            say(
                f"{room.name} {counted:>3} of {count:<3} {result.outcome:<9}{result.seconds:>6.1f} s"
                f"{result.tests:>5} tests  {result.rule}  {result.file}:{result.line}"
                f"\n       - {result.old}\n       + {result.new}" + (f"\n       by {result.by}" if result.by else "")
            )
            yield result


def write(path: Path, options: argparse.Namespace, results: list[Result]) -> None:
    """All that is known so far."""
    found = {
        "commit": commit(ROOT),
        "seed": options.seed,
        "count": options.count,
        "score": round(score(results), 4),
        "results": [asdict(r) for r in results],
    }
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
