"""What each test does in a tree without errors: its outcome, its duration, the lines and kernels that it executes."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .sites import Site

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
#: Lines around the name of a constant that are taken for its use.
_NEAR = 3


@dataclass
class Test:
    id: str
    seconds: float
    lines: dict[str, set[int]]
    kernels: frozenset[str]
    #: does it start a process, of which nothing is known?
    apart: bool = False


@dataclass
class Baseline:
    """The tests of some files that pass."""

    root: Path
    tests: list[Test] = field(default_factory=list)
    failing: list[str] = field(default_factory=list)

    def selected(self, site: Site, text: str, files: Iterable[str]) -> tuple[list[Test], list[Test]]:
        """The tests in these files that can notice an error, the likely and quick ones first; and all others."""
        wanted = set(files)
        tests = [t for t in self.tests if t.id.split("::")[0] in wanted]
        if site.file.startswith("cuda/"):
            name = site.file.removeprefix("cuda/")
            users = {source for source, included in self.includes.items() if name in included}
            chosen = [t for t in tests if t.kernels & users or t.apart]
        else:
            places = self.places(site, text)
            chosen = [
                t for t in tests if t.apart or any(not t.lines.get(f, _NONE).isdisjoint(n) for f, n in places.items())
            ]
        if all(t.apart for t in chosen):  # the line is executed when modules are imported, or never
            return ordered(tests, site), []
        ids = {t.id for t in chosen}
        return ordered(chosen, site), ordered([t for t in tests if t.id not in ids], site)

    def places(self, site: Site, text: str) -> dict[str, set[int]]:
        """Where a test passes if the error can matter to it: the statement or, if it makes a constant, its uses."""
        lines = set(range(site.first_line, site.last_line + 1))
        names = module_level_names(text, site.first_line)
        if not names:
            return {site.file: lines}
        word = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")
        found: dict[str, set[int]] = {}
        for path in (self.root / "bsrgemm").rglob("*.py"):
            uses = [i for i, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1) if word.search(line)]
            if uses:
                near = {n for i in uses for n in range(i - _NEAR, i + _NEAR + 1)}
                found[str(path.relative_to(self.root))] = near
        return found

    @cached_property
    def includes(self) -> dict[str, set[str]]:
        """Every CUDA source with all that it includes, itself too."""
        folder = self.root / "cuda"
        direct = {
            str(p.relative_to(folder)): set(_INCLUDE.findall(p.read_text(encoding="utf-8")))
            for p in folder.rglob("*.cu*")
        }
        found: dict[str, set[str]] = {}
        for name in direct:
            pending, seen = [name], set()
            while pending:
                one = pending.pop()
                if one not in seen:
                    seen.add(one)
                    pending += direct.get(one, ())
            found[name] = seen
        return found


_NONE: set[int] = set()


def ordered(tests: list[Test], site: Site) -> list[Test]:
    """One case of each test function first, quick ones before slow ones; files with the module's name come first."""
    stem = Path(site.file).stem

    def rank(test: Test) -> tuple[bool, float]:
        return stem not in test.id.split("::")[0] or test.seconds > 1, test.seconds

    first: dict[str, Test] = {}
    for test in sorted(tests, key=rank):
        first.setdefault(test.id.split("[")[0], test)
    ids = {t.id for t in first.values()}
    return [*first.values(), *sorted((t for t in tests if t.id not in ids), key=rank)]


def module_level_names(text: str, line: int) -> list[str]:
    """The names that a statement outside of functions defines: constants, fields, classes; none in a function."""
    names: list[str] = []
    body: list[ast.stmt] = ast.parse(text).body
    while True:
        node = next((n for n in body if n.lineno <= line <= (n.end_lineno or n.lineno)), None)
        if node is None or isinstance(node, ast.FunctionDef):
            return []
        if isinstance(node, ast.ClassDef):
            names.append(node.name)
            body = node.body
            continue
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        return found or names


def _apart(path: Path) -> set[str]:
    """Test functions of a file that start processes, themselves or by a function of the file."""
    text = path.read_text(encoding="utf-8")
    functions = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    starting: set[str] = set()
    for _ in range(2):
        word = re.compile(rf"\b(?:{'|'.join(['subprocess', *starting])})\b")
        starting |= {n.name for n in functions if word.search(ast.get_source_segment(text, n) or "")}
    return {name for name in starting if name.startswith("test")}


def _digest(root: Path, file: str) -> str:
    """A digest of everything that decides what the tests of a file do."""
    found = hashlib.sha256(sys.version.encode())
    shared = [p for folder in ("bsrgemm", "cuda", "tests") for p in (root / folder).rglob("*") if p.is_file()]
    for path in sorted(shared):
        kept = path.suffix in (".py", ".h", ".cu", ".cuh") and "mutation" not in path.parts
        if kept and (not path.name.startswith("test_") or path == root / file):
            found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:24]


def measured(
    root: Path, files: list[str], ask: Callable[[dict[str, Any]], dict[str, Any]], say: Callable[[str], None]
) -> Baseline:
    """The baseline of some test files, from an earlier run where nothing has changed since."""
    folder = Path(tempfile.gettempdir()) / "bsrgemm-mutation"
    folder.mkdir(exist_ok=True)
    found = Baseline(root)
    for file in files:
        kept = folder / f"{Path(file).stem}-{_digest(root, file)}.json"
        if kept.is_file():
            answer = json.loads(kept.read_text())
        else:
            say(f"without errors: {file}")
            request = {"tests": [file], "order": False, "import": None, "measure": True, "seconds": 3600}
            answer = ask(request)
            if "tests" not in answer:
                say(f"  {file}: {answer['outcome']}, left out")
                found.failing.append(file)
                continue
            kept.write_text(json.dumps(answer))
        apart = _apart(root / file)
        for name, (outcome, seconds, lines, kernels) in answer["tests"].items():
            if outcome == "failed":
                found.failing.append(name)
            elif outcome == "passed":
                test = name.split("::")[-1].split("[")[0]
                executed = {f: set(numbers) for f, numbers in lines.items()}
                found.tests.append(Test(name, seconds, executed, frozenset(kernels), test in apart))
    return found
