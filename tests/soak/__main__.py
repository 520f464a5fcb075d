"""``python -m tests.soak``: random cases over the whole public surface until one differs or the time is over."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# The problems are small: threads of BLAS would wait for each other. Read when NumPy is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    made.add_argument(
        "--backend", choices=("auto", "numpy", "cupy"), default="auto", help="default: the GPU if there is one"
    )
    made.add_argument("--minutes", type=float, help="how long to go on; default: 1 without --cases")
    made.add_argument("--cases", type=int, help="how many cases to run")
    made.add_argument("--seed", type=int, default=0, help="the seed of the first process; the next has the next one")
    made.add_argument("--case", type=int, help="run this case of the seed alone, as the line of a difference says")
    made.add_argument("--repeat", type=int, default=1, help="with --case: how often")
    made.add_argument("--threads", type=int, default=8, help="threads of the cases that use several")
    made.add_argument("--processes", type=int, default=1, help="processes, each with a seed of its own")
    made.add_argument("--keep-going", action="store_true", help="stop a process at the 20th difference, not the first")
    made.add_argument("--json", type=Path, help="write what was run, and that nothing was wrong, into this file")
    made.add_argument("--out-of-memory", action="store_true", help="let every allocation of every call fail once")
    made.add_argument("--calls", nargs="+", default=(), metavar="NAME", help="with --out-of-memory: these calls alone")
    made.add_argument("--surface", action="store_true", help="list the public names that no case calls")
    made.add_argument(
        "--stand-in", action="store_true", help="replace CuPy by the stand-in of tests/record: a rehearsal"
    )
    made.add_argument("--worker", nargs=2, metavar=("PLAN", "REPORT"), help=argparse.SUPPRESS)
    return made


def _install_stand_in() -> None:
    """Replace CuPy before anything imports it; processes that are started do the same."""
    os.environ["BSRGEMM_STAND_IN"] = "1"
    from ..record import stand_in

    stand_in.install()
    from ..record import host_results

    host_results.install()


def about(backend: str) -> dict[str, Any]:
    """The machine and the commit."""
    from bench import machine

    found = machine.commit() | {"date": time.strftime("%Y-%m-%d"), "backend": backend}
    if found["commit"] is None:
        found["commit"] = os.environ.get("BSRGEMM_COMMIT")
    if backend == "cuda":
        import cupy

        card = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
        found |= {"card": "stand-in" if os.environ.get("BSRGEMM_STAND_IN") == "1" else card, "cupy": cupy.__version__}
    return found


def main(given: list[str] | None = None) -> int:
    args = parser().parse_args(given)
    if args.stand_in or os.environ.get("BSRGEMM_STAND_IN") == "1":
        _install_stand_in()
    from . import run

    if args.worker:
        return run.run_worker(*args.worker)
    place = run.place_of(args.backend)
    if args.out_of_memory:
        from . import memory

        return memory.main(place, args.calls)
    if args.surface:
        from . import surface

        names = surface.uncalled(place, args.seed, 60)
        print("\n".join([*names, *(f"{name}: {why}" for name, why in surface.EXPLAINED.items())]))
        return 1 if names else 0
    minutes = 1.0 if args.minutes is None and args.cases is None and args.case is None else args.minutes
    until = None if minutes is None else time.time() + 60 * minutes
    one = {} if args.case is None else {"first": args.case, "step": 0, "cases": args.repeat}
    most = 20 if args.keep_going else 1
    plan = run.Plan(args.seed, place.name, args.threads, until, most=most, **({"cases": args.cases} | one))
    print(f"seed {args.seed} on {place.name}, {args.processes} processes", flush=True)

    def show(outcome: Any, number: int) -> None:
        speed = outcome.total / max(outcome.seconds, 1e-9)
        print(f"{outcome.total:>9,} cases, {outcome.checks:>10,} comparisons, {speed:,.0f} cases/s", flush=True)
        write(args, place.name, outcome, finished=False)

    if args.processes > 1 and args.case is None:
        outcome = run.run_processes(plan, args.processes, show)
    else:
        outcome = run.run_here(plan, show)
    return report(args, place.name, outcome)


def write(args: argparse.Namespace, backend: str, outcome: Any, *, finished: bool) -> None:
    """Write what was run into the file of --json."""
    if args.json is None:
        return
    said = {"finished": finished, "seed": args.seed, "processes": args.processes, "threads": args.threads}
    said |= {"seconds": round(outcome.seconds, 1), "cases": outcome.total, "comparisons": outcome.checks}
    said |= {"skipped": outcome.skipped, "wrong": len(outcome.wrong), "by_kind": dict(sorted(outcome.cases.items()))}
    said["seconds_by_kind"] = {name: round(t, 1) for name, t in sorted(outcome.seconds_by_kind.items())}
    args.json.write_text(json.dumps(about(backend) | said | {"differences": outcome.wrong}, indent=1) + "\n")


def report(args: argparse.Namespace, backend: str, outcome: Any) -> int:
    """Say what was run, write it down, and return the exit status."""
    write(args, backend, outcome, finished=True)
    skipped = f", {outcome.skipped:,} only possible on a card" if outcome.skipped else ""
    print(f"{outcome.total:,} cases and {outcome.checks:,} comparisons in {outcome.seconds:.1f} s{skipped}", flush=True)
    for wrong in outcome.wrong:
        print(f"\ncase {wrong['case']} ({wrong['kind']}) differs: {wrong['said']}\n\n{wrong['trace']}")
        print("reproduce it with\n")
        print(f"    {wrong['line']}\n")
    if not outcome.wrong:
        print("none wrong")
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
