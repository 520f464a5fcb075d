"""A sweep over the whole surface that shows where the cost jumps: ``python -m bench cliffs --seed 1 --cells 2000``.

Cells are drawn from dtypes, blocks, columns, orders, sides, patterns and sizes. Each is checked, and timed in turn with
what a user would do otherwise: BLAS on the matrix filled up, with and without the filling; CSR where blocks are small;
cuDNN and its like; and our own call with the nearest sizes that are known to be fast ("friendly"), times the ratio of
the work; of what a launch of attention takes, whatever its work is, nothing is saved. With --forced, the options of
each product are timed instead: predictions are fitted to that.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from . import machine, report
from .cases.case import Case, Peer, Ready
from .cliffs_cells import FRIENDLY, Cell, ProductCell
from .cliffs_draw import PARTS, draw, ordinary
from .internals import block_ways, forced, product_kernels
from .measure import Row, Run, reason_of
from .place import Call, Place
from .report import Column, Screen, aligned, duration, times

#: Shares of the cells that are slower than an alternative by more than these factors are listed
LIMITS = (1.0, 1.1, 1.5, 2.0)
#: Cells of the table of the worst, and cells whose kernels are compiled together before they are timed
_WORST, _TOGETHER = 20, 100


@dataclass(frozen=True)
class Forced(Cell):
    """A product by its options, of which `compiling` calls each once.

    Blocks of a result are computed in every way; one that is impossible takes the time of what is chosen.
    """

    compiling: bool = False
    #: the problem and the kernels by name, as soon as the operands are there
    problem: dict[str, Any] = field(default_factory=dict, compare=False)
    kernels: dict[str, Any] = field(default_factory=dict, compare=False)

    def ready(self, place: Place) -> Ready:
        case = self.case
        if not isinstance(case, ProductCell):
            ready = case.ready(place)
            ready.peers = {way: partial(_peer, partial(forced, ready.call, way)) for way in block_ways(self.part)}
            return ready
        A, B, out = case.operands(place)
        ready = case.ready_with(place, A, B, out)
        problem, starts = product_kernels(case.operand(A), B, out, case.left, case.kind)
        self.problem.update(problem)
        self.kernels.update({str(kernel): kernel for kernel in starts})
        ready.peers = {str(kernel): partial(_peer, start) for kernel, start in starts.items()}

        def every() -> None:
            for make in ready.peers.values():
                with contextlib.suppress(Exception):  # occurs again in the measurement, which reports it
                    make().call()

        return Ready(every, ready.error) if self.compiling else ready

    def timed(self, row: Row) -> list[dict[str, Any]]:
        """Each kernel with its fields and microseconds, or why there are none; the chosen one comes first."""
        found = []
        for name, kernel in self.kernels.items():
            fields = {
                key: x if isinstance(x, int | str | dict) else str(getattr(x, "value", x))
                for key, x in asdict(kernel).items()
            }
            peer = dict(row["peers"].get(name, {"failed": row.get("failed", "not measured")}))
            us = {"us": 1e6 * peer.pop("seconds")} if "seconds" in peer else peer
            found.append({"kernel": type(kernel).__name__, "fields": fields, "name": name} | us)
        return found


def _peer(start: Callable[[], Call]) -> Peer:
    return Peer(start())


def rows(run: Run, cells: Sequence[Cell]) -> Iterator[Row]:
    """A row for each cell, a hundred at a time: their kernels are compiled side by side before anything is timed."""
    for first in range(0, len(cells), _TOGETHER):
        gc.freeze()  # what there is now stays, and the collection after each cell need not walk it
        some = cells[first : first + _TOGETHER]
        friends: list[Case] = list(dict.fromkeys(cell.friend for cell in some))
        compiled = [Forced(c.part, c.case, c.friend, True) if isinstance(c, Forced) else c for c in some]
        run.compile([*compiled, *([] if compiled != list(some) else friends)])
        for part in sorted({cell.part for cell in some if isinstance(cell, Forced)} - {"products"}):
            for way in block_ways(part):  # one after the other, since all threads are forced at once
                forced(partial(run.compile, [cell.case for cell in some if cell.part == part]), way)()
        for cell in some:
            yield finished(cell, run.row(cell))


def finished(cell: Cell, row: Row) -> Row:
    """A row with how much slower the cell is than its best alternative, or with the times of all kernels."""
    row |= {"part": cell.part, "kind": cell.kind, "work": cell.work}
    if isinstance(cell, Forced) and isinstance(cell.case, ProductCell):
        row |= {"problem": cell.problem, "kernels": cell.timed(row), "peers": {}}
    peers = {name: peer for name, peer in row["peers"].items() if "ratio" in peer}
    if FRIENDLY in peers:
        peers[FRIENDLY]["ratio"] *= cell.share(peers[FRIENDLY].get("seconds", 0.0))
    if peers:
        row["best"] = min(peers, key=lambda name: float(peers[name]["ratio"]))
        row["slower"] = 1 / peers[row["best"]]["ratio"]
    return row


# ------------------------------------------------------------------------------------------ tables
def worst(found: Sequence[Row]) -> list[list[str]]:
    """The cells that are slowest beside their best alternative, with all alternatives."""
    chosen = sorted((row for row in found if "slower" in row), key=lambda row: -float(row["slower"]))[:_WORST]
    columns = (
        Column("time", lambda row: duration(row["seconds"])),
        Column("slower", lambda row: times(row["slower"])),
        Column("than", lambda row: str(row["best"])),
        report.Peers(lambda row, peer: times(1 / peer["ratio"]) if "ratio" in peer else ""),
    )
    return report.table(columns, chosen, "cell")


def shares(found: Sequence[Row]) -> list[list[str]]:
    """How many cells are slower than their best alternative, by part and by dtype, and than each alternative."""
    groups: dict[str, list[float]] = {}
    for row in found:
        if "slower" in row:
            for name in ("all", row["part"], row["kind"]):
                groups.setdefault(name, []).append(row["slower"])
            for name, peer in row["peers"].items():
                if "ratio" in peer:
                    groups.setdefault(f"than {name}", []).append(1 / peer["ratio"])
    names = sorted(groups, key=lambda name: (name != "all", name not in PARTS, name.startswith("than"), name))
    lines = [["cells slower by more than", "number", *(f"{limit:g} x" for limit in LIMITS), "median", "worst"]]
    for name in names:
        ratios = groups[name]
        counts = [f"{sum(x > limit for x in ratios) / len(ratios):.0%}" for limit in LIMITS]
        lines.append([name, str(len(ratios)), *counts, times(median(ratios)), times(max(ratios))])
    return lines


def heat_map(found: Sequence[Row], path: Path) -> None:
    """Medians of how much slower products are, by block and columns: a picture for each dtype."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    groups: dict[str, dict[tuple[int, int], list[float]]] = {}
    for row in found:
        if row["part"] == "products" and "slower" in row:
            place = max(row["case"]["block"]).bit_length() - 1, row["case"]["columns"].bit_length() - 1
            groups.setdefault(row["kind"], {}).setdefault(place, []).append(row["slower"])
    if not groups:
        raise ValueError("there are no products to draw")
    across, down = min(3, len(groups)), -(-len(groups) // 3)
    figure = Figure(figsize=(4.5 * across + 1.5, 3.2 * down))
    figure.subplots_adjust(hspace=0.4)
    every = figure.subplots(down, across, squeeze=False)
    for axes, (kind, places) in zip(every.flat, sorted(groups.items()), strict=False):
        shown = [[median(places.get((b, n), [float("nan")])) for n in range(13)] for b in range(9)]
        image = axes.imshow(shown, norm=LogNorm(0.25, 4), cmap="RdBu_r", origin="lower", aspect="auto")
        axes.set_title(f"{kind}: side of a block, by columns of B", fontsize=9)
        axes.set_xticks(range(0, 13, 2), [1 << n for n in range(0, 13, 2)])
        axes.set_yticks(range(0, 9, 2), [1 << b for b in range(0, 9, 2)])
        for (b, n), ratios in places.items():
            middle = median(ratios)
            color = "black" if 0.5 < middle < 2 else "white"
            axes.text(n, b, f"{middle:.2g}", ha="center", va="center", fontsize=6, color=color)
    for axes in every.flat[len(groups) :]:
        axes.set_axis_off()
    figure.colorbar(image, ax=every, label="time over that of the best alternative")
    figure.savefig(path)


# ------------------------------------------------------------------------------------------ command
def parser() -> argparse.ArgumentParser:
    """The options of a sweep."""
    made = argparse.ArgumentParser(
        prog="python -m bench cliffs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--seed", type=int, default=1, help="the same seed draws the same cells on every machine")
    made.add_argument("--cells", type=int, default=200, metavar="N", help="how many; default: 200")
    made.add_argument("--first", type=int, default=0, metavar="N", help="leave out so many cells at the beginning")
    made.add_argument("--part", nargs="+", choices=[*PARTS, "all"], default=["all"], help="default: all")
    made.add_argument("--device", choices=["cpu", "cuda"], help="default: the GPU if there is one")
    made.add_argument("--forced", action="store_true", help="time the ways to compute products, sddmm or sparse")
    made.add_argument("--ordinary", action="store_true", help="432 products on a grid instead of cells at random")
    made.add_argument("--list", action="store_true", help="name the cells, and measure nothing")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all rows there, also when stopped")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw a heat map of the products there")
    made.add_argument("--commit", metavar="HASH", help="what is measured, where there is no git")
    return made


def main(argv: Sequence[str]) -> int:
    """Measure a sweep; the exit status is 1 where a cell failed or was wrong."""
    options = parser()
    args = options.parse_args(argv)
    every = ["products"] if args.forced else list(PARTS)
    parts = every if "all" in args.part else args.part
    if args.forced and not set(parts) <= {"products", "sddmm", "sparse"}:
        options.error(f"--forced: wanted products, sddmm or sparse, got --part {' '.join(parts)}")
    place = Place(args.device, quick=True, idle=0.0)
    if args.forced and not place.on_gpu and not args.list:
        options.error("--forced: there is one kernel on the CPU and nothing to choose; it needs a GPU")
    on_cpu = args.device == "cpu" or not (place.on_gpu or args.list)
    drawn = ordinary() if args.ordinary else draw(args.seed, args.first + args.cells, parts, on_cpu)
    cells = drawn[args.first :]
    if args.forced:
        cells = [Forced(cell.part, cell.case, cell.friend) for cell in cells]
    if args.list:
        print("\n".join(f"{number:5} {cell}" for number, cell in enumerate(cells, args.first)))
        return 0
    screen, start, found = Screen(), time.perf_counter(), list[Row]()
    words = " ".join(["python -m bench cliffs", *argv])
    about = {"study": "cliffs", "device": place.device, "machine": machine.describe(), "seed": args.seed}
    run = Run(place, say=screen.say)
    cut = None
    try:
        for row in rows(run, cells):
            found.append(row | {"number": args.first + len(found)})
            if report.status(row):
                screen.note(f"{found[-1]['number']:5} {row['what']}: {report.status(row)}")
            if len(found) % max(1, len(cells) // 20) == 0:
                screen.note(f"{len(found):5} of {len(cells)} cells, {time.perf_counter() - start:.0f} s")
    except KeyboardInterrupt:
        cut = "interrupted"
    except Exception as error:  # a kernel that fails takes the card with it; what was measured stays
        cut = reason_of(error)
        screen.note(f"stopped after {len(found)} cells: {cut}")
    if args.json:
        about |= {"parts": parts, "command": words, "cut": cut} | machine.commit(args.commit)
        report.write(args.json, about | {"roofs": place.roofs(), "rows": found})
        screen.note(f"written: {args.json}")
    return tell(screen, found, run, args.plot, cut)


def tell(screen: Screen, found: Sequence[Row], run: Run, plot: Path | None, cut: str | None) -> int:
    """Print the tables and draw the heat map; the exit status."""
    if any("slower" in row for row in found):
        screen.note(f"\n{aligned(shares(found))}\n\n{aligned(worst(found))}\n")
        if plot:
            try:
                heat_map(found, plot)
                screen.note(f"drawn: {plot}")
            except (ImportError, OSError, ValueError) as error:
                screen.note(f"{plot} was not drawn: {error}")
    for text in report.remarks(found):
        screen.note(f"- {text}")
    if run.absent:
        screen.note(f"not installed, and left out: {', '.join(run.absent)}")
    bad = sum(report.status(row) is not None for row in found)
    screen.note(f"{len(found)} cells, {bad} without a result{f', {cut}' if cut else ''}")
    return int(bool(bad or cut))
