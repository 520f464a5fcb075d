"""What bench/spmv.py, bench/spgemm.py and bench/sddmm.py share: where they run, matrices, exact results, timed lines.

A result of ours is compared with float64, worked out here without bsrgemm, before it is timed; one that is wrong is
shown as WRONG and not timed. A peer that is missing, fails or is wrong leaves a "-", and the reason below the table.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import report
import scipy.sparse
from gemm_checks import TOLERANCE, checked
from harness import Table

import bsrgemm as bg
from bsrgemm._benchmark import product_peers
from bsrgemm._benchmark.random_data import module_of, normal, widen
from bsrgemm._benchmark.timing import Call, time_cpu, time_gpu, time_sustained

#: Repeats of a timing, and of one with --quick
REPEATS, REPEATS_QUICK = {"cpu": 5, "cuda": 20}, 5
#: Seconds of a call that does not feel what is in the L2: it is timed once
LONG = 0.1
#: Bytes that are copied to find the bandwidth
COPIED = {"cpu": 1 << 27, "cuda": 1 << 30}
#: Columns of a short block row lie so near to the diagonal
REACH = 2048
#: Elements in float64 at a time
CHUNK = 1 << 25

#: cusparseDirection_t and cusparseOperation_t of <cusparse.h>
_ROW_MAJOR = _AS_IT_IS = 0

Makers = dict[str, Callable[[], Call]]


# --------------------------------------------------------------------------------------------- run
@dataclass
class Bench(report.Bench):
    """The options of a run, and what could not be measured."""

    device: str = "cpu"
    #: seconds before each timing: a card throttles at its power limit and remembers what ran before
    idle: float = 0.05
    plot: Path | None = None

    @property
    def xp(self) -> Any:
        if self.device == "cpu":
            return np
        import cupy

        return cupy

    def seconds(self, call: Call) -> float:
        """Median seconds of a call; on a GPU by events, with the L2 flushed by reading."""
        repeats = REPEATS_QUICK if self.quick else REPEATS[self.device]
        if self.device == "cpu":
            return time_cpu(call, repeats)
        once = time_sustained(call, seconds=0)
        return once if once > LONG else time_gpu(call, repeats, self.idle)

    @cached_property
    def copy_rate(self) -> float:
        """Bytes read and written in a second by a copy."""
        source = self.xp.ones(COPIED[self.device] // 8, np.float64)
        target = self.xp.empty_like(source)
        return 2 * source.nbytes / self.seconds(lambda: self.xp.copyto(target, source))

    def target(self, value: float | None) -> float | None:
        """What is to be reached, on a GPU: there are no targets for the CPU."""
        return value if self.device == "cuda" else None

    def release(self) -> None:
        """Give back memory that CuPy keeps."""
        if self.device == "cuda":
            self.xp.get_default_memory_pool().free_all_blocks()


def run(
    script: str, about: str | None, sections: report.Sections, default: str, argv: Sequence[str] | None, idle: float,
    plots: bool = False,
) -> None:  # fmt: skip
    """The command line of a script, and its sections."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="?", choices=[*sections, "all"], default=default, help=f"default: {default}")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if harness.has_gpu() else "cpu")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--quick", action="store_true", help="a subset, 5 repeats; bench/results/ is left alone")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write there and not to bench/results/")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to this file")
    if plots:
        parser.add_argument("--plot", type=Path, metavar="DIR", help="draw `blocks` there, as PNG and SVG")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not harness.has_gpu():
        raise SystemExit("--device cuda: there is no GPU that CuPy can use; --device cpu runs here")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        harness.RESULTS = options.out
        print(f"bench/results/ stands for {options.out} in this run")
    if options.device == "cpu":
        sections = {name: (f"{title}, smaller, by NumPy", section) for name, (title, section) in sections.items()}
    bench = Bench(
        options.quick, not options.no_peers, device=options.device, idle=idle, plot=options.plot if plots else None
    )
    keep = not options.quick or options.out is not None
    report.run_sections(script, sections, options, bench, options.device, keep)


def guarded(bench: Bench, table: Table, label: str, add_line: Call) -> None:
    """Measure a line; if that fails, as for want of memory, a line says so and the run goes on."""

    def done() -> bool:
        add_line()
        return True

    if bench.attempt("bench", label, done) is None:
        table.add(f"{label} | -", what=" ".join(label.split()), failed=True)


def measured(
    bench: Bench, table: Table, label: str, call: Call, error: Callable[[Any], float], kind: str
) -> float | None:
    """Seconds of a call of ours whose result is right; otherwise a line says what is the matter."""
    table.progress(label)
    off = bench.attempt("bsrgemm", label, lambda: error(call()))
    what = " ".join(label.split())
    if off is not None and not off <= TOLERANCE[kind]:
        table.add(f"{label} | WRONG: off by {off:.1e}, not timed", what=what, wrong=True, deviation=off)
        return None
    seconds = None if off is None else bench.attempt("bsrgemm", label, partial(bench.seconds, call))
    if seconds is None:
        table.add(f"{label} | -", what=what, failed=True)
    return seconds


def peer_seconds(
    bench: Bench, label: str, makers: Makers, error: Callable[[Any], float], kind: str
) -> dict[str, float | None]:
    """Seconds of each peer whose result is right."""

    def seconds(make: Callable[[], Call]) -> float:
        return bench.seconds(checked(make(), error, kind))

    asked = makers.items() if bench.with_peers else ()
    return {name: bench.attempt(name, label, partial(seconds, make)) for name, make in asked}


# ---------------------------------------------------------------------------------------- matrices
def banded(xp: Any, lengths: np.ndarray, columns: int) -> tuple[Any, Any]:
    """(indices, indptr) of block rows of the given lengths: different columns, at random, sorted.

    They lie within REACH of the diagonal, or in three times as many places as the row has blocks, and around the edge.
    """
    rows = len(lengths)
    first = np.concatenate([[0], np.cumsum(lengths)])
    row = xp.asarray(np.repeat(np.arange(rows), lengths))
    each = xp.asarray(lengths)[row]
    width = xp.minimum(columns, xp.maximum(2 * REACH + 1, 3 * each))
    # Sorted numbers without the room that the blocks take, and then one place more for each block before.
    drawn = xp.sort(row + xp.random.default_rng(0).random(len(row))) - row
    place = xp.minimum((drawn * (width - each + 1)).astype(np.int64), width - each)
    place += xp.arange(len(row)) - xp.asarray(first)[row]
    column = (row * columns // rows - width // 2 + place) % columns
    indices = xp.sort(row * columns + column) - row * columns
    return indices.astype(np.int32), xp.asarray(first.astype(np.int32))


def banded_matrix(xp: Any, lengths: np.ndarray, block: tuple[int, int], dtype: str) -> Any:
    """A matrix of random blocks with as many block columns as block rows."""
    rows = len(lengths)
    indices, indptr = banded(xp, lengths, rows)
    data = normal((len(indices), *block), dtype, xp)
    return bg.bsr_array((data, indices, indptr), shape=(rows * block[0], rows * block[1]))


def as_scipy(A: Any) -> scipy.sparse.bsr_array:
    """One of our matrices on the host, in the same arrays."""
    return scipy.sparse.bsr_array((A.data, A.indices, A.indptr), shape=A.shape)


def as_csr(A: Any) -> Any:
    """The CSR of SciPy or cupyx; its columns are sorted and different, which cupyx need not find out."""
    S = A.tocsr()
    S.has_canonical_format = True
    return S


# ------------------------------------------------------------------------------------------- exact
def block_rows(A: Any) -> Any:
    """The block row of each block."""
    xp = module_of(A.data)
    return xp.searchsorted(A.indptr, xp.arange(len(A.indices), dtype=A.indptr.dtype), side="right") - 1


def exact(A: Any, x: Any, transposed: bool = False) -> Any:
    """A x or A.T x for a vector, in float64."""
    xp, (R, C) = module_of(A.data), A.blocksize
    data, source, target, blocks = A.data, A.indices, block_rows(A), A.shape[0] // R
    if transposed:
        data, source, target, blocks = data.transpose(0, 2, 1), target, source, A.shape[1] // C
    height, width = data.shape[1:]
    pieces = widen(x).reshape(-1, width)
    result = xp.zeros((blocks, height))
    step = max(1, CHUNK // width)
    for start in range(0, len(data), step):
        own = slice(start, start + step)
        near = pieces[source[own]]
        for r in range(height):
            sums = (widen(data[own, r]) * near).sum(axis=1)
            result[:, r] += xp.bincount(target[own], sums, minlength=blocks)
    return result.reshape(-1)


def deviation(A: Any, X: Any, got: Any, transposed: bool = False) -> float:
    """Largest |got - A X| over the root of the number of terms, which are standard normal. NaN if anything is.

    Of a matrix X the columns are added up with random signs: all rows at the price of a vector.
    """
    xp, (R, C) = module_of(A.data), A.blocksize
    X, got = widen(X), widen(got)
    if X.ndim == 2:
        signs = xp.asarray(np.random.default_rng(1).choice([-1.0, 1.0], X.shape[1])) / X.shape[1] ** 0.5
        X, got = X @ signs, got @ signs
    target, height, width = (A.indices, C, R) if transposed else (block_rows(A), R, C)
    terms = width * xp.bincount(target, minlength=len(got) // height)
    off = xp.abs(got - exact(A, X, transposed)).reshape(-1, height).max(axis=1)
    return float((off / xp.sqrt(xp.maximum(terms, 1))).max())


# ------------------------------------------------------------------------------------------- peers
def cusparse_bsrmv(A: Any, x: Any, out: Any) -> Call:
    """cusparse<t>bsrmv for square blocks; cusparseSpMV in a cuSPARSE that has no bsrmv any more."""
    from cupy.cuda import device, get_current_stream
    from cupy_backends.cuda.libs import cusparse

    library = product_peers._libcusparse()
    function = getattr(library, {"float32": "cusparseSbsrmv", "float64": "cusparseDbsrmv"}[A.dtype.name], None)
    R, C = A.blocksize
    if function is None or R != C or R == 1:
        return product_peers.cusparse_bsr_vector(A, x, out)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [pointer, *[number] * 5, *[pointer] * 5, number, *[pointer] * 3]
    factors = np.array([1, 0], A.dtype)
    handle, about = device.get_cusparse_handle(), cusparse.createMatDescr()
    arguments = (
        handle, _ROW_MAJOR, _AS_IT_IS, A.shape[0] // R, A.shape[1] // C, len(A.data),
        factors[:1].ctypes.data, about, A.data.data.ptr, A.indptr.data.ptr, A.indices.data.ptr, R,
        x.data.ptr, factors[1:].ctypes.data, out.data.ptr,
    )  # fmt: skip

    def call(_: Any = (A, x, factors)) -> Any:
        cusparse.setStream(handle, get_current_stream().ptr)
        status = function(*arguments)
        if status:
            raise RuntimeError(f"bsrmv: status {status}")
        return out

    return call
