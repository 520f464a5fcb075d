"""What all scripts share: options, clocks and checks, what could not be measured, the way through the sections."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from . import machine, provenance, table
from .table import Table, writing
from .timing import Call, Clock, Timing

Row = dict[str, Any]
#: How far a result is off
Error = Callable[[Any], float]
#: Name of a peer -> function that prepares it; it raises where the peer is not installed or does not serve the case.
Makers = Mapping[str, Callable[[], Call]]


def number(value: float | None, width: int, digits: int = 1) -> str:
    """A right-aligned number, or "-"."""
    return f"{'-' if value is None else f'{value:.{digits}f}':>{width}}"


def mark(reached: bool | None) -> str:
    return {True: "yes", False: "no", None: ""}[reached]


def reason_of(error: BaseException) -> str:
    """One line of an error."""
    text = str(error).strip().split("\n")[0][:160]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def checked(call: Call, error: Error, allowed: float) -> Call:
    """The call, if its result is right; ValueError otherwise."""
    off = error(call())
    if not off <= allowed:
        raise ValueError(f"wrong result: off by {off:.1e}, allowed {allowed:.1e}")
    return call


@dataclass
class Bench:
    """The options of a run, its clock, and what could not be measured."""

    quick: bool = False
    with_peers: bool = True
    device: str = "cuda"
    #: whether only the rows of the README are measured
    headline: bool = False
    missing: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    #: Packages that are not installed, and those that were reported already: once in a run is enough.
    absent: set[str] = field(default_factory=set)
    said: set[str] = field(default_factory=set)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def clock(self) -> Clock:
        return Clock(self.device, self.quick)

    @property
    def xp(self) -> Any:
        """NumPy or CuPy."""
        if not self.on_gpu:
            return np
        import cupy

        return cupy

    def some(self, everything: Sequence[Any], quick: Sequence[Any]) -> Sequence[Any]:
        """The part of a list that this run takes."""
        return quick if self.quick else everything

    def target(self, value: float | None) -> float | None:
        """A target, on a GPU: there are none for the CPU."""
        return value if self.on_gpu else None

    def synchronize(self) -> None:
        if self.on_gpu:
            self.xp.cuda.Device().synchronize()

    def release(self) -> None:
        """Free the memory that CuPy has cached."""
        if self.on_gpu:
            self.xp.get_default_memory_pool().free_all_blocks()

    # ---------------------------------------------------------------------------------- failures
    def attempt(self, what: str, where: str, function: Callable[[], Any]) -> Any:
        """The function's result, or None after storing the reason: a missing package must not stop a run."""
        try:
            return function()
        except Exception as error:
            self.failed(what, where, error)
            return None

    def failed(self, what: str, where: str, error: Exception) -> None:
        """Keep a reason for `explain`."""
        text = f"{what}: {reason_of(error)}"
        if text not in self.said:
            self.missing[text].append(" ".join(where.split()))
        if isinstance(error, ImportError):
            self.absent.add(text)

    def explain(self, shown: Table) -> None:
        """Print why there is a "-" where there is one."""
        for reason, cases in self.missing.items():
            more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
            shown.note(f"  - {reason} ({cases[0]}{more})")
        self.missing.clear()
        self.said |= self.absent

    # ------------------------------------------------------------------------------------ timing
    def seconds(self, call: Call) -> float:
        """Median seconds of one call by itself."""
        return self.clock.seconds(call)

    def interleaved(self, calls: Mapping[str, Call], where: str) -> dict[str, float]:
        """Median seconds of calls that are timed in turn; those that fail are left out, the first one may not."""
        first = next(iter(calls))

        def failed(name: str, error: Exception) -> None:
            if name == first:
                raise error
            self.failed(name, where, error)

        return {name: timing.seconds for name, timing in self.timings(calls, failed).items()}

    def timings(self, calls: Mapping[str, Call], failed: Callable[[str, Exception], None]) -> dict[str, Timing]:
        return self.clock.interleaved(calls, failed)

    def prepared(self, makers: Makers, where: str, error: Error, allowed: float) -> dict[str, Call]:
        """The calls of those peers that are installed and give correct results."""
        asked = makers.items() if self.with_peers else ()
        made = {
            name: self.attempt(name, where, lambda make=make: checked(make(), error, allowed))  # type: ignore[misc]
            for name, make in asked
        }
        return {name: call for name, call in made.items() if call is not None}

    def verified(self, shown: Table, label: str, call: Call, error: Error, allowed: float) -> bool:
        """Whether our call returns a correct result. If not, its line says so and it is not timed."""
        shown.progress(label)
        off = self.attempt("bsrgemm", label, lambda: error(call()))
        what = " ".join(label.split())
        if off is None:
            shown.add(f"{label} | -", what=what, failed=True)
        elif not off <= allowed:
            shown.add(f"{label} | WRONG: off by {off:.1e}, not timed", what=what, wrong=True, deviation=off)
        return off is not None and off <= allowed

    def guarded(self, shown: Table, label: str, add_line: Call) -> None:
        """Measure a line; if that fails, for example for lack of memory, a line says so and the run goes on."""

        def done() -> bool:
            add_line()
            return True

        if self.attempt("bench", label, done) is None:
            shown.add(f"{label} | -", what=" ".join(label.split()), failed=True)


#: Name of a section -> (title, what measures it)
Sections = dict[str, tuple[str, Callable[[Any, Table], None]]]


@dataclass(frozen=True)
class Script:
    """A script with sections, which `main` runs."""

    name: str
    about: str | None
    sections: Sections
    default: str = "table"
    #: what makes the `Bench` from the options
    bench: Callable[[argparse.Namespace], Bench] = lambda options: Bench(
        options.quick, not options.no_peers, options.device
    )
    #: adds options that only this script has
    more: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    #: called before the first section, to compile kernels side by side
    ahead: Callable[[Any, Table, Sequence[str]], None] | None = None
    needs_gpu: bool = False

    def arguments(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """The options that were given."""
        parser = argparse.ArgumentParser(description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter)
        sections = [*self.sections, "all"]
        parser.add_argument(
            "section", nargs="?", choices=sections, default=self.default, help=f"default: {self.default}"
        )
        parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if machine.has_gpu() else "cpu")
        parser.add_argument("--no-peers", action="store_true", help="ours alone")
        parser.add_argument("--quick", action="store_true", help="a subset, 5 repeats; bench/results/ is left alone")
        parser.add_argument(
            "--headline", action="store_true", help="the rows of the README alone, put among the others"
        )
        parser.add_argument("--out", type=Path, metavar="DIR", help="write there and not to bench/results/")
        parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to this file")
        provenance.add_option(parser)
        self.more(parser)
        return parser.parse_args(argv)

    def main(self, argv: Sequence[str] | None = None) -> None:
        """Measure what the command line asks for."""
        options = self.arguments(argv)
        if options.device == "cuda" and not machine.has_gpu():
            raise SystemExit("--device cuda: there is no GPU that CuPy can use; --device cpu runs here")
        if options.device == "cpu" and self.needs_gpu:
            raise SystemExit(f"bench/run/{self.name}.py needs a GPU; bench/run/matmul.py runs anywhere")
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            table.RESULTS = options.out
            print(f"bench/results/ stands for {options.out} in this run")
        bench = self.bench(options)
        bench.headline = options.headline
        self._run(options, bench)

    def _run(self, options: argparse.Namespace, bench: Bench) -> None:
        """Measure the chosen sections one by one, and write each as soon as it ends, in whatever way.

        A section that fails does not stop the others. SIGTERM ends a run as an interrupt does: what was measured is
        written. On the CPU sections are smaller, and are kept only where a folder was named for them.
        """
        start = time.perf_counter()
        names = list(self.sections) if options.section == "all" else [options.section]
        keep = options.out is not None or (bench.on_gpu and not options.quick)
        written: dict[str, list[Row]] = {}
        failed = []
        with provenance.recording(by_load=names == ["host"]) as launched:
            for name in names:
                title, section = self.sections[name]
                title = title if bench.on_gpu else f"{title}, smaller, by NumPy"
                shown = Table(f"{self.name}_{name}_{options.device}", title, launched)
                shown.merge = bench.headline
                written[name] = shown.rows
                ahead = partial(self.ahead, bench, shown, names) if self.ahead and name == names[0] else None
                outcome = measure_section(bench, shown, section, ahead, keep)
                if outcome == "failed":
                    failed.append(name)
                if options.json:
                    about = {"machine": machine.describe(), **provenance.commit()}
                    options.json.write_text(json.dumps(about | written, indent=1) + "\n")
                if outcome == "interrupted":
                    raise SystemExit("interrupted")
        print(f"{time.perf_counter() - start:.0f} s")
        if failed:
            raise SystemExit(f"failed: {', '.join(failed)}")


def measure_section(
    bench: Bench, shown: Table, section: Callable[[Any, Table], None], ahead: Call | None, keep: bool
) -> str:
    """Measure one section and write it; "done", "failed" or "interrupted"."""
    try:
        with writing(shown, keep):
            try:
                if ahead is not None:
                    ahead()
                    shown.forget_launches()
                section(bench, shown)
            finally:
                bench.explain(shown)
    except KeyboardInterrupt:
        return "interrupted"
    except Exception:
        traceback.print_exc()
        return "failed"
    return "done"
