"""Two checkouts of bsrgemm on one card, the same cases in turn: does the new one lose anything?

OLD and NEW are folders that hold a folder `bsrgemm`: checkouts, or where packages are installed. Each is loaded by a
process of its own, which times a case of this benchmark and something that stands for the speed of the card (a dense
product or a copy) on request: old, new, old, new. A ratio is the time of new over old, each over the card's time of the
same turn; the spread is half the range of the ratios of the rounds. Host times are multiples of the time of
``cupy.add(x, x)``. The exit status is 1 where new is slower beyond the larger of 2 % and the spread (5 % for host
times), fails, or gives another result.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from . import machine, report

#: Studies whose quick cases are compared by default
STUDIES = ("products", "vectors", "attention", "decode", "squares", "sampled", "gradients")
HOST = "host"
#: A ratio up to this counts as the same, whatever the spread; host times are noisier
LEAST_LOSS, LEAST_HOST_LOSS = 0.02, 0.05
#: Relative difference of two checksums that other roundings explain
SAME_RESULT = 1e-2
ROUNDS = 3
#: One of the two checkouts: its `ask` answers a command
Side = Any
WORKER = Path(__file__).with_name("compare_worker.py")


class Process:
    """A worker in a process of its own."""

    def __init__(self, tree: Path, device: str, studies: Sequence[str], full: bool) -> None:
        if not (tree / "bsrgemm" / "__init__.py").is_file():
            raise ValueError(f"{tree}: expected a folder that holds a folder bsrgemm")
        words = [sys.executable, "-P", str(WORKER), str(tree), device, str(int(full)), *studies]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(words, **pipes, cwd=tree)
        self.hello = self.ask(do="hello")
        if not Path(self.hello.get("file", "/")).resolve().is_relative_to(tree.resolve()):
            self.close()
            raise ValueError(
                f"{tree}: another bsrgemm was loaded, {self.hello.get('file') or self.hello.get('failed')}"
            )

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            return {"failed": f"the process ended with status {self._process.wait()}"}
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass
class Line:
    """One case on both sides: what each round found, in seconds or multiples of cupy.add."""

    name: str
    least_loss: float = LEAST_LOSS
    #: (old, the card, new, the card) of each round; the card's are 1 for host times
    rounds: list[tuple[float, float, float, float]] = field(default_factory=list)
    beside: str = ""
    #: why there are no times, for old and for new
    failed: tuple[str | None, str | None] = (None, None)

    @property
    def ratios(self) -> list[float]:
        return [(new / card_new) / (old / card_old) for old, card_old, new, card_new in self.rounds]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def spread(self) -> float:
        return (max(self.ratios) - min(self.ratios)) / 2

    @property
    def verdict(self) -> str:
        """slower, faster, same, lost (new fails where old works) or nothing (old fails)."""
        old_failed, new_failed = self.failed
        if old_failed or new_failed:
            return "nothing" if old_failed else "lost"
        noise = max(self.least_loss, self.spread)
        return "slower" if self.ratio > 1 + noise else "faster" if self.ratio < 1 - noise else "same"

    def cells(self) -> list[str]:
        if not self.rounds:
            why = next((x for x in self.failed if x), "not measured")
            return [self.name, "-", "-", "-", "-", self.beside, f"{self.verdict}: {why}"]
        shown = [median(found[k] for found in self.rounds) for k in (0, 2)]
        host = self.least_loss == LEAST_HOST_LOSS
        both = [report.times(x) if host else report.duration(x) for x in shown]
        return [self.name, *both, f"{self.ratio:.3f}", f"{self.spread:.1%}", self.beside, self.verdict]


def compare_case(old: Side, new: Side, name: str, rounds: int = ROUNDS) -> Line:
    """One case: prepared on both sides at once, then timed in turn."""
    line, sides = Line(name), (old, new)
    with ThreadPoolExecutor(2) as pool:
        ready = list(pool.map(lambda side: side.ask(do="prepare", case=name), sides))
    line.failed = (ready[0].get("failed"), ready[1].get("failed"))
    line.beside = ready[1].get("beside", "")
    if not any(line.failed):
        sums = [found["checksum"] for found in ready]
        if not abs(sums[0] - sums[1]) <= SAME_RESULT * abs(sums[0]):
            line.failed = (None, f"another result: {sums[1]:.6g}, not {sums[0]:.6g}")
    for _ in range(rounds if not any(line.failed) else 0):
        found = [side.ask(do="time", case=name) for side in sides]
        line.failed = (found[0].get("failed"), found[1].get("failed"))
        if any(line.failed):
            line.rounds.clear()
            break
        line.rounds.append((found[0]["ours"], found[0]["card"], found[1]["ours"], found[1]["card"]))
    for side in sides:
        side.ask(do="drop", case=name)
    return line


def compare_host(old: Side, new: Side, rounds: int = ROUNDS) -> list[Line]:
    """Host times of small calls, in turn."""
    lines: dict[str, Line] = {}
    for _ in range(rounds):
        found = [side.ask(do="host") for side in (old, new)]
        failed = (found[0].get("failed"), found[1].get("failed"))
        if any(failed):
            return [Line(HOST, LEAST_HOST_LOSS, failed=failed)]
        for name, adds in found[1]["adds"].items():
            line = lines.setdefault(name, Line(f"{HOST}: {name}", LEAST_HOST_LOSS, beside="cupy.add"))
            line.rounds.append((found[0]["adds"][name], 1.0, adds, 1.0))
    return list(lines.values())


def compare(
    old: Side, new: Side, cases: Sequence[str], wanted: Callable[[str], bool], say: Callable[[str], None]
) -> list[Line]:
    """All cases that are wanted, then the host."""
    lines = []
    for name in filter(wanted, cases):
        start = time.perf_counter()
        lines.append(compare_case(old, new, name))
        say(f"{name}: {lines[-1].verdict}, {time.perf_counter() - start:.1f} s")
    return lines + (compare_host(old, new) if wanted(HOST) else [])


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two checkouts; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="a folder that holds bsrgemm")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument("study", nargs="*", default=STUDIES, help=f"studies with cases; default: {', '.join(STUDIES)}")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if machine.has_gpu() else "cpu")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help=f'parts of names; "{HOST}" for host times'
    )
    parser.add_argument("--full", action="store_true", help="all cases of the studies, not those of a quick run")
    options = parser.parse_args(argv)
    sides: list[Process] = []
    start = time.perf_counter()
    try:
        for tree in (options.old, options.new):
            sides.append(Process(tree.resolve(), options.device, options.study, options.full))
        lines = compare(
            sides[0], sides[1], sides[1].hello["cases"],
            lambda name: not options.only or any(text in name for text in options.only),
            lambda text: print(text, file=sys.stderr, flush=True),
        )  # fmt: skip
    except (KeyError, ValueError) as error:
        parser.error(str(error))
    finally:
        for side in sides:
            side.close()
    heads = ["case", "old", "new", "ratio", "spread", "beside", ""]
    print(report.aligned([heads, *(line.cells() for line in lines)]))
    bad = [line.name for line in lines if line.verdict in ("slower", "lost")]
    outcome = f"slower or lost: {', '.join(bad)}" if bad else "nothing is lost"
    print(f"{len(lines)} cases, {time.perf_counter() - start:.0f} s: {outcome}")
    return int(bool(bad) or not lines)
