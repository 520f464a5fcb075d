"""A @ x and A @ X for small blocks: how near to the bandwidth of a copy, beside cuSPARSE, warp, cupyx and SciPy.

300,000 block rows of 27 blocks, at random within 2048 of the diagonal. Rate = bytes of values, indices, indptr, x and y
over time; share = of the bytes that a copy of 1 GB reads and writes in the same run. Medians by CUDA events, L2 flushed
by reading. table: square blocks in float64 and float32. blocks: every square block up to 16 and some others. columns:
16 right-hand sides; blocks of more than 8 x 8 have fewer rows. uneven: long rows, rows of all lengths, A.T @ x. Without
a GPU the same runs on the CPU, smaller.
"""

from __future__ import annotations

import argparse
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

import bsrgemm as bg

from .. import machine, runner
from ..cases.small_blocks import as_csr, as_scipy, banded_matrix
from ..checks.products import TOLERANCE, vector_deviation
from ..patterns import even_lengths, zipf_lengths
from ..peers import products as product_peers
from ..random_data import normal
from ..runner import Makers, Row, Script, Sections, mark, number
from ..show import figures
from ..show.headline import HEADLINE_SIDES
from ..table import Table
from ..timing import Call

#: Block rows, and blocks of one
ROWS, EACH = {"cpu": 5_000, "cuda": 300_000}, 27
#: Side of a block -> share of the copy to be reached
TARGETS = {
    "float64": {2: 0.90, 3: 0.94, 4: 0.98, 5: 0.95, 6: 0.98, 8: 1.0},
    "float32": {2: 0.83, 3: 0.89, 4: 0.93, 5: 0.89, 6: 0.95, 8: 1.0},
}
TARGET_ANY = 0.80
#: Sides of the blocks that cupyx is asked for, by a vector and by columns: CSR is large and slow
CSR_SIDES, CSR_SIDES_COLUMNS = (3, 4, 6), (3, 4)
BLOCKS = [*((b, b) for b in range(1, 17)), (2, 3), (3, 2), (6, 3), (3, 6), (1, 16), (16, 1), (13, 11)]
#: Elements of a block up to which there are ROWS block rows
MOST_ELEMENTS = 36
COLUMNS = 16
#: (side of a block, dtype) -> milliseconds to be reached
COLUMN_CASES = {
    (3, "float64"): 0.43, (4, "float64"): 0.63, (6, "float64"): 1.06, (8, "float64"): None, (16, "float64"): None,
    (32, "float64"): None, (64, "float64"): None, (3, "float32"): 0.27, (16, "float32"): None,
}  # fmt: skip
#: Elements of a block up to which there are ROWS block rows with so many columns
MOST_ELEMENTS_COLUMNS = 64
#: Rate of a matrix with a row of a third of all columns, over that of an even one
TARGET_UNEVEN = 0.85


#: Bytes that are copied to find the bandwidth
COPIED = {"cpu": 1 << 27, "cuda": 1 << 30}


@dataclass
class Bench(runner.Bench):
    """The options of a run, and the bandwidth of a copy."""

    plot: Path | None = None

    @cached_property
    def copy_rate(self) -> float:
        """Bytes read and written in a second by a copy."""
        source = self.xp.ones(COPIED[self.device] // 8, np.float64)
        target = self.xp.empty_like(source)
        return 2 * source.nbytes / self.seconds(lambda: self.xp.copyto(target, source))


def traffic(A: Any, X: Any, Y: Any) -> int:
    """Bytes that must be read and written at least once."""
    return sum(x.nbytes for x in (A.data, A.indices, A.indptr, X, Y))


def operands(bench: Bench, lengths: np.ndarray, block: tuple[int, int], dtype: str, N: int = 1) -> tuple[Any, Any, Any]:
    """A, and X and Y of N columns, or vectors."""
    bench.release()
    A = banded_matrix(bench.xp, lengths, block, dtype)
    shape = () if N == 1 else (N,)
    return A, normal((A.shape[1], *shape), dtype, bench.xp), bench.xp.empty((A.shape[0], *shape), dtype)


def peers_of(bench: Bench, A: Any, X: Any, Y: Any, csr_sides: Sequence[int]) -> Makers:
    """The peers that can multiply these operands."""
    if bench.device == "cpu":
        S = as_scipy(A)
        return {
            "scipy bsr": lambda: partial(operator.matmul, S, X),
            "scipy csr": lambda: partial(operator.matmul, as_csr(A), X),
        }
    theirs = bench.xp.empty_like(Y)
    bsr = product_peers.cusparse_bsrmv if X.ndim == 1 else product_peers.cusparse_bsr
    found: dict[str, Callable[[], Call]] = {"cuSPARSE BSR": lambda: bsr(A, X, theirs)}
    if X.ndim == 1:  # warp has no product with a dense matrix
        found["warp"] = lambda: product_peers.warp_bsr(A, X, theirs)
    if A.blocksize[0] in csr_sides:
        found["cupyx csr"] = lambda: partial(operator.matmul, as_csr(A), X)
    return found


def beside_peers(
    bench: Bench, table: Table, label: str, operands: tuple[Any, Any, Any], csr_sides: Sequence[int] | None
) -> tuple[float, dict[str, float | None]] | None:
    """Seconds of A @ X and of its peers in turn, None for a peer that is not available; None if our result is wrong."""
    A, X, Y = operands
    error, allowed = partial(vector_deviation, A, X), TOLERANCE[A.dtype.name]
    call = partial(bg.matmul, A, X, out=Y)
    if not bench.verified(table, label, call, error, allowed):
        return None
    makers = peers_of(bench, A, X, Y, csr_sides) if csr_sides is not None and bench.with_peers else {}
    times = bench.interleaved({"bsrgemm": call} | bench.prepared(makers, label, error, allowed), label)
    return times["bsrgemm"], {name: times.get(name) for name in makers}


def line(
    bench: Bench, table: Table, block: tuple[int, int], dtype: str, rows: int, target: float | None, peers: bool = True
) -> None:
    """A @ x of one block size, as a share of the bandwidth of a copy."""
    label = f"{'{} x {}'.format(*block):>7} {dtype:8}"
    A, x, y = operands(bench, np.full(rows, EACH), block, dtype)
    found = beside_peers(bench, table, label, (A, x, y), CSR_SIDES if peers else None)
    if found is None:
        return
    seconds, theirs = found
    moved = traffic(A, x, y)
    shares = {name: taken and moved / taken / bench.copy_rate for name, taken in theirs.items()}
    share = moved / seconds / bench.copy_rate
    reached = None if target is None else share >= target
    beside = "".join(f" | {name} {number(other, 5, 2)}" for name, other in shares.items())
    table.add(
        f"{label} | {seconds * 1e3:8.4f} ms {moved / seconds / 1e9:7.1f} GB/s | {share:5.2f} | {number(target, 4, 2)} "
        f"{mark(reached):3}{beside}",
        block=block, dtype=dtype, rows=rows, blocks=len(A.data), bytes=moved, seconds=seconds,
        gbps=moved / seconds / 1e9, copy_gbps=bench.copy_rate / 1e9, share=share, peers=shares, target=target,
        target_of="copy", reached=reached,
    )  # fmt: skip


def say_copy(bench: Bench, table: Table) -> None:
    """Measure the copy before anything else."""
    table.note(f"copy: {bench.copy_rate / 1e9:.1f} GB/s read and written")


def section_table(bench: Bench, table: Table) -> None:
    """Square blocks in float64 and float32."""
    say_copy(bench, table)
    kinds = {"float64": TARGETS["float64"]} if bench.headline else TARGETS
    for dtype, targets in kinds.items():
        for side in HEADLINE_SIDES if bench.headline else bench.some(list(targets), [3, 8]):
            target, rows = bench.target(targets[side]), ROWS[bench.device]
            add = partial(line, bench, table, (side, side), dtype, rows, target)
            bench.guarded(table, f"{side} x {side} {dtype}", add)


def section_blocks(bench: Bench, table: Table) -> None:
    """Every square block up to 16 x 16 and some others, float64."""
    say_copy(bench, table)
    for R, C in bench.some(BLOCKS, [(1, 1), (3, 3), (13, 11)]):
        rows = int(ROWS[bench.device] * min(1, MOST_ELEMENTS / (R * C)))
        add = partial(line, bench, table, (R, C), "float64", rows, bench.target(TARGET_ANY), peers=False)
        bench.guarded(table, f"{R} x {C} float64", add)
    if bench.plot is not None:
        for path in bench.attempt("matplotlib", "plot", partial(draw, table.rows, bench.plot)) or ():
            table.note(f"drawn: {path}")


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """The shares of `blocks` as bars, square blocks first."""
    import matplotlib

    shown = [row for row in rows if row.get("share")]
    with matplotlib.rc_context(figures.STYLE):
        title = "A @ x in float64 as a share of the bandwidth of a copy, by block"
        figure, axes = figures.new_axes(title, {"machine": machine.describe()}, (9.0, 4.3))
        colors = [figures.COLORS[row["block"][0] != row["block"][1]] for row in shown]
        axes.bar(range(len(shown)), [row["share"] for row in shown], 0.75, color=colors)
        axes.axhline(1, color="black", linewidth=1)
        axes.axhline(TARGET_ANY, color="black", linewidth=1, linestyle=":")
        labels = ["{} x {}".format(*row["block"]) for row in shown]
        axes.set_xticks(range(len(shown)), labels, rotation=60, ha="right", fontsize=8)
        axes.set(xlabel="block", ylabel="share of the bandwidth of a copy", ylim=(0, None))
        axes.grid(axis="x", visible=False)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"spmv_blocks.{kind}" for kind in ("png", "svg")]
        for path in paths:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def columns_line(bench: Bench, table: Table, side: int, dtype: str, target: float | None) -> None:
    """A @ X of one block size, in milliseconds."""
    label = f"{f'{side} x {side}':>7} {dtype:8} {COLUMNS} columns"
    rows = max(EACH, int(ROWS[bench.device] * min(1, MOST_ELEMENTS_COLUMNS / side**2)))
    A, X, Y = operands(bench, np.full(rows, EACH), (side, side), dtype, COLUMNS)
    found = beside_peers(bench, table, label, (A, X, Y), CSR_SIDES_COLUMNS)
    if found is None:
        return
    seconds, theirs = found
    reached = None if target is None else seconds * 1e3 <= target
    beside = "".join(f" | {name} {number(taken and taken * 1e3, 8, 3)} ms" for name, taken in theirs.items())
    moved = traffic(A, X, Y)
    table.add(
        f"{label} | {seconds * 1e3:8.3f} ms | at most {number(target, 4, 2)} {mark(reached):3}{beside}",
        block=(side, side), dtype=dtype, rows=rows, blocks=len(A.data), columns=COLUMNS, bytes=moved,
        flops=2 * A.data.size * COLUMNS, seconds=seconds, gbps=moved / seconds / 1e9, peers=theirs, target=target,
        target_of="ms", reached=reached,
    )  # fmt: skip


def section_columns(bench: Bench, table: Table) -> None:
    """16 right-hand sides."""
    for (side, dtype), target in COLUMN_CASES.items():
        add = partial(columns_line, bench, table, side, dtype, bench.target(target))
        bench.guarded(table, f"{side} x {side} {dtype} {COLUMNS} columns", add)


@dataclass(frozen=True)
class Product:
    """A product with a vector, and whether the matrix is transposed in it."""

    A: Any
    x: Any
    out: Any
    transposed: bool = False

    def __call__(self) -> Any:
        return bg.matmul(self.A.T if self.transposed else self.A, self.x, out=self.out)

    @property
    def bytes(self) -> int:
        return traffic(self.A, self.x, self.out)


def compare(bench: Bench, table: Table, label: str, ours: Product, base: Product, target: float | None) -> None:
    """One line: bytes a second of a product over those of a base, both timed in turn."""
    error = partial(vector_deviation, ours.A, ours.x, transposed=ours.transposed)
    if not bench.verified(table, f"{label:40}", ours, error, TOLERANCE["float64"]):
        return
    times = bench.interleaved({"ours": ours, "base": base}, label)
    seconds, reference = times["ours"], times["base"]
    relative = ours.bytes / seconds / (base.bytes / reference)
    reached = None if target is None else relative >= target
    table.add(
        f"{label:40} | {seconds * 1e3:8.4f} ms {ours.bytes / seconds / 1e9:7.1f} GB/s | "
        f"relative rate {relative:5.2f} | {number(target, 4, 2)} {mark(reached)}",
        what=label, blocks=len(ours.A.data), bytes=ours.bytes, seconds=seconds, base_seconds=reference,
        relative=relative, target=target, target_of="even", reached=reached,
    )  # fmt: skip


def uneven_lengths(rows: int) -> dict[str, tuple[np.ndarray, float | None]]:
    """Lengths of block rows, and what is to be reached."""
    one = np.full(rows, EACH)
    one[rows // 2] = rows // 3
    power = zipf_lengths(rows, rows, rows * EACH)
    return {
        f"one row of {rows // 3:,} blocks": (one, TARGET_UNEVEN),
        "power law, rows in random order": (np.random.default_rng(1).permutation(power), None),
        "power law, rows sorted by length": (power, None),
    }


def uneven_line(bench: Bench, table: Table, label: str, lengths: np.ndarray, target: float | None) -> None:
    """Uneven rows against even ones with as many blocks."""
    A, x, y = operands(bench, lengths, (3, 3), "float64")
    E = banded_matrix(bench.xp, even_lengths(len(lengths), len(A.data)), (3, 3), "float64")
    compare(bench, table, label, Product(A, x, y), Product(E, x, y), target)


def transposed_line(bench: Bench, table: Table, label: str) -> None:
    """A.T @ x against A @ x."""
    A, x, y = operands(bench, np.full(ROWS[bench.device], EACH), (3, 3), "float64")
    compare(bench, table, label, Product(A, x, y, transposed=True), Product(A, x, y), None)


def section_uneven(bench: Bench, table: Table) -> None:
    """Uneven rows, and the transpose; 3 x 3, float64."""
    for label, (lengths, target) in uneven_lengths(ROWS[bench.device]).items():
        bench.guarded(table, label, partial(uneven_line, bench, table, label, lengths, bench.target(target)))
    bench.guarded(table, "A.T @ x", partial(transposed_line, bench, table, "A.T @ x"))


SECTIONS: Sections = {
    "table": ("A @ x as a share of the bandwidth of a copy", section_table),
    "blocks": ("A @ x by block, float64", section_blocks),
    "columns": ("A @ X, 16 right-hand sides", section_columns),
    "uneven": ("A @ x on uneven rows, 3 x 3 blocks, float64", section_uneven),
}


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw `blocks` there, as PNG and SVG")


def _bench(options: argparse.Namespace) -> Bench:
    return Bench(options.quick, not options.no_peers, options.device, plot=options.plot)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    Script("spmv", __doc__, SECTIONS, bench=_bench, more=_more).main(argv)
