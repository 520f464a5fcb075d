"""Measures this machine: ``python -m bsrgemm bench``, on the GPU if there is one, otherwise on the CPU, smaller."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_GROUPS = ("gemm", "spmv", "attention", "decode")
_DTYPES = ("float16", "bfloat16", "e4m3", "tf32", "float32", "float64")


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure this machine beside every peer that is installed",
        description="Measure products and attention beside dense BLAS, cuSPARSE, SciPy, torch and whatever else is "
        "installed. A result is checked before it is timed; a ratio is a peer's time over ours. The roof is the "
        "larger of flops over the rate of dense BLAS and bytes over the bandwidth of a copy, both of this run.",
    )
    parser.add_argument("group", nargs="?", choices=[*_GROUPS, "all"], default="all", help="default: all")
    parser.add_argument("--quick", action="store_true", help="a few problems, under a minute")
    several: dict[str, Any] = {"nargs": "+", "default": [], "metavar": "N"}
    parser.add_argument("--size", type=_count, help="rows of A, or length of the sequence", **several)
    parser.add_argument("--block", type=_count, help="rows and columns of a block", **several)
    parser.add_argument("--columns", type=_count, help="columns of B", **several)
    parser.add_argument("--density", type=_density, help="share of the blocks that are there", **several)
    parser.add_argument("--dtype", choices=_DTYPES, nargs="+", default=[])
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: the GPU if there is one")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured, also when stopped")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw what was measured, as PNG and SVG")
    parser.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("OLD", "NEW"),
        help="what got slower between two files; status 1 if any",
    )
    parser.set_defaults(command=lambda args: _run(parser, args))


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return value


def _density(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected more than 0 and at most 1, got {text}")
    return value


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    if args.compare:
        return _compare(parser, *args.compare)
    if args.device == "cuda":
        from .._environment import cuda_problem

        problem = cuda_problem()
        if problem:
            parser.error(f"--device cuda: no GPU can be used here: {problem}")
    if args.plot:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            parser.error('--plot draws with matplotlib: pip install "bsrgemm[bench]"')
    for path in (args.json, args.plot):
        if path and not path.parent.is_dir():
            parser.error(f"{path.parent} is not a folder")
    from .._benchmark.measure.suite import Choice, problems
    from .._benchmark.place import place_of

    choice = Choice(*(tuple(x) for x in (args.size, args.density, args.block, args.columns, args.dtype)))
    place = place_of(args.device)
    groups = list(_GROUPS) if args.group == "all" else [args.group]
    try:
        wanted = problems(groups, place, args.quick, choice)
    except ValueError as error:
        parser.error(str(error))
    return _measure(args, place, wanted)


def _measure(args: argparse.Namespace, place: Any, wanted: list[Any]) -> int:
    from .._benchmark import machine, provenance, results
    from .._benchmark.measure.suite import Suite
    from .._benchmark.show.screen import screen

    start = time.perf_counter()
    suite = Suite(place, args.quick, not args.no_peers)
    found: dict[str, Any] = {
        "machine": machine.describe(), **provenance.commit(), "command": _command(args), "device": place.name,
        "quick": args.quick, "seed": 0, "rows": suite.rows,
    }  # fmt: skip
    with screen(len(wanted)) as shown, provenance.recording() as launched:
        suite.launched = launched
        try:
            shown.note(_where(found["machine"], place.name))
            _measure_all(suite, wanted, shown)
        except KeyboardInterrupt:
            found["cut"] = "interrupted"
            suite.rows[:] = [row for row in suite.rows if row.get("seconds") or row.get("wrong") or row.get("failed")]
        finally:
            found["ceilings"] = suite.ceilings.as_dict()
            found["duration"] = time.perf_counter() - start
            if args.json:
                results.write(args.json, found)
        shown.end(suite.rows)
        if suite.absent:
            shown.note(f"- not installed, and left out: {', '.join(suite.absent)}")
    print(f"{len(suite.rows)} of {len(wanted)} problems, {found['duration']:.0f} s")
    return _finish(args, found)


def _measure_all(suite: Any, wanted: list[Any], shown: Any) -> None:
    """Compile, measure the upper bounds of the machine, then measure problem by problem."""
    suite.say = lambda text: shown.doing("kernels", text)
    suite.say("compiling")
    suite.meet(wanted)
    suite.say("ceilings")
    shown.note(_roofs(suite, sorted({problem.computed_in for problem in wanted})))
    for problem in wanted:
        suite.say = _about(shown.doing, str(problem))
        suite.measure(problem)
        shown.row(suite.rows)


def _finish(args: argparse.Namespace, found: dict[str, Any]) -> int:
    """Report the files that were written and draw the requested pictures; return the exit status."""
    if args.json:
        print(f"written: {args.json}")
    if args.plot and found["rows"]:
        from .._benchmark.show.figures import draw_all

        for path in draw_all(found, args.plot):
            print(f"drawn: {path}")
    if "cut" in found:
        print("interrupted: what was measured is above", file=sys.stderr)
        return 130
    return int(any(row.get("wrong") or row.get("failed") for row in found["rows"]))


def _command(args: argparse.Namespace) -> str:
    """The command line that repeats the measurement."""
    words = ["python -m bsrgemm bench", args.group]
    for name in ("size", "block", "columns", "density", "dtype"):
        values = getattr(args, name)
        words += [f"--{name}", *map(str, values)] if values else []
    words += ["--device", args.device] if args.device else []
    words += [flag for flag, given in (("--quick", args.quick), ("--no-peers", args.no_peers)) if given]
    return " ".join(words)


def _about(doing: Callable[[str, str], None], name: str) -> Callable[[str], None]:
    return lambda text: doing(name, text)


def _where(machine: dict[str, Any], place: str) -> str:
    if place == "cuda":
        return f"bsrgemm {machine['bsrgemm']} on {machine['card']}, CuPy {machine['cupy']}, NVRTC {machine['nvrtc']}"
    text = f"bsrgemm {machine['bsrgemm']} on the CPU ({machine['cpu']}, {machine['cores']} cores), sizes for a CPU"
    return text if "card" in machine else f"{text}: no GPU was found"


def _roofs(suite: Any, kinds: list[str]) -> str:
    """The two ceilings, measured now."""
    copied = suite.ceilings.bytes_per_second()
    parts = [f"copy {copied / 1e9:,.0f} GB/s"] if copied else []
    for kind in kinds:
        found = suite.ceilings.flops_per_second(kind)
        if found:
            parts.append(f"dense {kind} {found / 1e12:,.{0 if found >= 1e14 else 2}f} TFLOP/s")
    return ", ".join(parts) or "neither a copy nor a dense product could be measured: there is no roof"


def _compare(parser: argparse.ArgumentParser, old_path: Path, new_path: Path) -> int:
    from .._benchmark import results
    from .._benchmark.show.changes import changes, lost

    try:
        old, new = results.read(old_path), results.read(new_path)
    except ValueError as error:
        parser.error(str(error))
    cards = [found["machine"].get("card", found["machine"].get("cpu")) for found in (old, new)]
    if cards[0] != cards[1]:
        print(f"different machines: {cards[0]} and {cards[1]}")
    compared = sorted(changes(old, new), key=lambda change: -change.times)
    gone = lost(old, new)
    for change in compared:
        print(change)
    for text in gone:
        print(f"lost   {text}")
    slower = sum(change.slower for change in compared)
    print(
        f"{len(compared)} problems in both: {slower} slower, {sum(c.faster for c in compared)} faster, {len(gone)} lost"
    )
    if not compared and not gone:
        print("nothing in common", file=sys.stderr)
    return int(bool(slower or gone or not compared))
