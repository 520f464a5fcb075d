"""The loop over cases: in this process until a case differs or the time is over, or in several processes at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..strategies import Place
from . import arithmetic, attend, formats, gradients, indexing, products, sequences  # noqa: F401 - they register their kinds
from .case import Case, run_case

ROOT = Path(__file__).parents[2]
#: Seconds between two lines of progress, and after the end of its time until a process counts as stuck.
_EVERY, _GRACE = 5.0, 15.0


@dataclass(frozen=True)
class Plan:
    """What to run: numbers from `first` on, `step` apart, until one of the limits."""

    seed: int
    backend: str
    threads: int = 8
    #: Unix time at which no further case begins; None: no limit
    until: float | None = None
    cases: int | None = None
    first: int = 0
    step: int = 1
    #: differences after which to stop
    most: int = 1


@dataclass
class Outcome:
    """What was run, and the differences: number, kind, message, traceback and line of each case that differed."""

    cases: Counter[str] = field(default_factory=Counter)
    checks: int = 0
    skipped: int = 0
    seconds: float = 0.0
    seconds_by_kind: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.cases.values())

    def add(self, other: Outcome) -> None:
        self.cases += other.cases
        self.checks += other.checks
        self.skipped += other.skipped
        self.seconds = max(self.seconds, other.seconds)
        self.seconds_by_kind += other.seconds_by_kind
        self.wrong += other.wrong


def place_of(backend: str) -> Place:
    """The place for --backend: "numpy", "cupy", or the card if there is one."""
    if backend == "auto":
        import bsrgemm

        return Place(bsrgemm.default_device())
    return Place({"numpy": "cpu", "cupy": "cuda"}.get(backend, backend))


def reproduce(plan: Plan, number: int) -> str:
    """The line that runs one case again."""
    backend = {"cpu": "numpy", "cuda": "cupy"}.get(place_of(plan.backend).name, plan.backend)
    threads = "" if plan.threads == 8 else f" --threads {plan.threads}"
    return f"python -m tests.soak --backend {backend} --seed {plan.seed} --case {number}{threads}"


def run_here(
    plan: Plan, show: Callable[[Outcome, int], None], begin: Callable[[int], Any] = lambda number: None
) -> Outcome:
    """Run cases in this process; `show` is called every few seconds, `begin` before each case."""
    place, outcome = place_of(plan.backend), Outcome()
    start = shown = time.monotonic()
    number = plan.first
    while plan.cases is None or outcome.total + outcome.skipped + len(outcome.wrong) < plan.cases:
        if plan.until is not None and time.time() >= plan.until:
            break
        begin(number)
        case = Case(plan.seed, number, place, plan.threads)
        began = time.perf_counter()
        try:
            outcome.cases[run_case(case)] += 1
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if type(error).__name__ == "NotOnStandIn":
                outcome.skipped += 1
            else:
                outcome.wrong.append(_difference(plan, case, error))
                if len(outcome.wrong) >= plan.most:
                    break
        outcome.seconds_by_kind[case.doing] += time.perf_counter() - began
        outcome.checks += case.checks
        number += plan.step
        if time.monotonic() - shown >= _EVERY:
            shown = time.monotonic()
            outcome.seconds = shown - start
            show(outcome, number)
    outcome.seconds = time.monotonic() - start
    return outcome


def _difference(plan: Plan, case: Case, error: BaseException) -> dict[str, Any]:
    said = {"case": case.number, "kind": case.doing, "said": f"{type(error).__name__}: {error}"[:3000]}
    return said | {"line": reproduce(plan, case.number), "trace": traceback.format_exc()[-4000:]}


# ----------------------------------------------------------------------------------------- processes
class Worker:
    """A process that runs a part of the cases, the files in which it says what it does, and what it has said."""

    def __init__(self, plan: Plan, folder: Path, index: int) -> None:
        self.plan, self.index = plan, index
        self.state, self.report, self.log = (folder / f"{index}.{name}" for name in ("case", "json", "log"))
        command = [sys.executable, "-m", "tests.soak", "--worker", json.dumps(asdict(plan)), str(self.report)]
        environment = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"} | dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH", ""))))
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def outcome(self) -> Outcome:
        """What the process has said so far."""
        try:
            said = json.loads(self.report.read_text())
        except (OSError, ValueError):
            return Outcome()
        counters = {name: Counter(said[name]) for name in ("cases", "seconds_by_kind")}
        return Outcome(**(said | counters))

    def failure(self, why: str) -> dict[str, Any]:
        """A process that ended by itself, or did not end: its last case is to blame."""
        number = int(self.state.read_text().strip() or self.plan.first) if self.state.exists() else self.plan.first
        return {
            "case": number, "kind": "", "said": f"{why}; the last lines of the process follow",
            "line": reproduce(self.plan, number), "trace": self.log.read_text(errors="replace")[-4000:],
        }  # fmt: skip


def run_worker(text: str, report: str) -> int:
    """What a process of `run_processes` does."""
    import faulthandler

    faulthandler.enable()
    plan, path = Plan(**json.loads(text)), Path(report)
    state = os.open(path.with_suffix(".case"), os.O_CREAT | os.O_WRONLY)

    def write(outcome: Outcome, number: int = 0) -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(vars(outcome)))
        new.replace(path)

    outcome = run_here(plan, write, lambda number: os.pwrite(state, b"%-20d" % number, 0))
    write(outcome)
    return 1 if outcome.wrong else 0


def run_processes(plan: Plan, count: int, show: Callable[[Outcome, int], None]) -> Outcome:
    """Split the numbers of a run over processes; the first difference ends all of them."""
    with tempfile.TemporaryDirectory() as name:
        workers = []
        for index in range(count):
            part = asdict(plan) | {"seed": plan.seed + index}
            if plan.cases is not None:
                part["cases"] = plan.cases // count + (index < plan.cases % count)
            workers.append(Worker(Plan(**part), Path(name), index))
        shown, total = time.monotonic(), Outcome()
        try:
            while any(worker.process.poll() is None for worker in workers):
                time.sleep(0.2)
                over = plan.until is not None and time.time() > plan.until + _GRACE
                if over or (plan.most == 1 and any(worker.process.poll() not in (None, 0) for worker in workers)):
                    break
                if time.monotonic() - shown >= _EVERY:
                    shown, total = time.monotonic(), _together(workers)
                    show(total, total.total)
            return _verdict(workers)
        finally:
            for worker in workers:
                worker.process.kill()
                worker.process.wait()


def _together(workers: list[Worker]) -> Outcome:
    total = Outcome()
    for worker in workers:
        total.add(worker.outcome())
    return total


def _verdict(workers: list[Worker]) -> Outcome:
    """All that was run; a process that ended without a report of a difference, or did not end, counts as one."""
    total = _together(workers)
    stopped = bool(total.wrong) and workers[0].plan.most == 1
    for worker in workers:
        code = worker.process.poll()
        if code is None and not stopped and all(other.process.poll() in (None, 0) for other in workers):
            total.wrong.append(worker.failure("the process did not end in time"))
        elif code not in (None, 0) and not worker.outcome().wrong:
            total.wrong.append(worker.failure(f"the process ended with {code}"))
    return total
