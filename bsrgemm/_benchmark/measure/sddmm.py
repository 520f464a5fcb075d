"""X @ Y on the blocks of a pattern: how fast, beside dense cuBLAS and torch's sampled_addmm.

8192 x 8192 x 8192 in float16, 4096 in float32, tf32 and float64, density 0.22, Y row-major and column-major. Rate = 2 *
elements of blocks * depth over time; ratio = to the rate of the dense product of the same operands, timed in turn with
ours. torch has CSR alone, and float32 where it has no float16. Without a GPU the same runs on the CPU, smaller,
beside a dense product in NumPy, which is in float32 where ours is in float16.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import bsrgemm as bg

from ..checks.products import TOLERANCE, block_rows
from ..patterns import pattern_of
from ..peers.attention import as_array, tensor
from ..peers.products import dense_cublas
from ..random_data import normal, stored_dtype, widen
from ..runner import Bench, Makers, Script, Sections, checked, mark, number
from ..table import Table
from ..timing import Call

#: Rows, columns and depth, by dtype
SIDES = {
    "cpu": {"float16": 1024, "float32": 512, "tf32": 512, "float64": 512},
    "cuda": {"float16": 8192, "float32": 4096, "tf32": 4096, "float64": 4096},
}
DENSITY = 0.22
#: dtype -> side of a block -> share of the dense rate to be reached
BLOCKS: dict[str, dict[int, float | None]] = {
    "float16": {128: 0.80, 64: None, 32: None, 16: None},
    "float32": {128: None, 32: None},
    "tf32": {128: None, 32: None},
    "float64": {128: None, 32: None},
}
#: Block of the pattern that torch gets as CSR
TORCH_BLOCK = 128


@dataclass
class Operands:
    """X and Y, both layouts of Y, their product in float64, and the dense product as a call."""

    X: Any
    layouts: dict[str, Any]
    want: Any
    dense: dict[str, Call]

    @classmethod
    def of(cls, bench: Bench, n: int, dtype: str) -> Operands:
        xp = bench.xp
        X, Y = normal((n, n), dtype, xp), normal((n, n), dtype, xp)
        want = widen(X) @ widen(Y)

        def dense() -> Call:
            if bench.on_gpu:
                call = dense_cublas(X, Y, xp.empty_like(X), dtype == "tf32")
            else:
                call = partial(np.matmul, *(x.astype(np.float32) if dtype == "float16" else x for x in (X, Y)))
            return checked(call, lambda got: float(abs(widen(got) - want).max()) / n**0.5, TOLERANCE[dtype])

        made = bench.attempt("dense", f"{n} {dtype}", dense)
        layouts = {"row": Y, "column": xp.asfortranarray(Y)}
        return cls(X, layouts, want, {} if made is None else {"dense": made})


def pattern_matrix(xp: Any, n: int, b: int, dtype: str) -> Any:
    """A matrix of zeros whose blocks are those to be computed."""
    found = pattern_of("uniform", n, (b, b), DENSITY)
    lists = (xp.asarray(x.astype(np.int32)) for x in (found.indices, found.indptr))
    A = bg.bsr_array((xp.zeros((found.blocks, b, b), stored_dtype(dtype)), *lists), shape=(n, n))
    A.sum_duplicates()  # there are no duplicates; this call stores that
    return A


def deviation(want: Any, pattern: Any, got: Any) -> float:
    """Largest error of a block over the root of the depth, which is the size of an element."""
    b, n = pattern.blocksize[0], len(want)
    tiles = want.reshape(n // b, b, n // b, b).transpose(0, 2, 1, 3)[block_rows(pattern), pattern.indices]
    return float(abs(widen(got) - tiles).max()) / n**0.5


def torch_sampled(pattern: Any, X: Any, Y: Any) -> Call:
    """torch.sparse.sampled_addmm with the elements of all blocks as CSR, in float32 where it refuses float16."""
    import torch

    S = pattern.astype(np.float32).tocsr()
    lists = [tensor(x.astype(np.int64)) for x in (S.indptr, S.indices)]

    def made(kind: Any) -> Call:
        operands = [tensor(x).to(kind) for x in (X, Y)]
        stored = torch.sparse_csr_tensor(*lists, torch.zeros(len(S.data), dtype=kind, device="cuda"), size=S.shape)
        return lambda: torch.sparse.sampled_addmm(stored, *operands, beta=0.0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CSR is beta
        try:
            call = made(tensor(X).dtype)
            call()
        except RuntimeError:
            call = made(torch.float32)
            call()
    return call


def peers_of(bench: Bench, pattern: Any, X: Any, Y: Any) -> Makers:
    asked = bench.on_gpu and pattern.blocksize[0] == TORCH_BLOCK and X.itemsize == 2
    return {"torch sampled_addmm": partial(torch_sampled, pattern, X, Y)} if asked else {}


def csr_deviation(want: Any, pattern: Any, result: Any) -> float:
    """As `deviation`, for elements in the order of CSR."""
    b, n = pattern.blocksize[0], len(want)
    values = as_array(result.values())
    # A row of elements consists of its parts of the blocks of its block row, one block after the other.
    each = len(pattern.indices) * b // n
    by_row = values.reshape(n // b, b, each, b).transpose(0, 2, 1, 3).reshape(-1, b, b)
    return deviation(want, pattern, by_row)


def line(
    bench: Bench, table: Table, b: int, dtype: str, layout: str, given: Operands, target: float | None
) -> None:  # fmt: skip
    """One block size and one layout of Y: ours, the dense product and torch in turn."""
    X, Y, n = given.X, given.layouts[layout], len(given.X)
    label = f"{n:5} {b:4} {dtype:8} Y {layout + '-major':12}"
    pattern = pattern_matrix(bench.xp, n, b, dtype)

    def off(got: Any) -> float:
        return deviation(given.want, pattern, got.data)

    call = partial(bg.sddmm, X, Y, pattern, precision="tf32" if dtype == "tf32" else None)
    if not bench.verified(table, label, call, off, TOLERANCE[dtype]):
        return
    makers = peers_of(bench, pattern, X, Y) if layout == "row" and bench.with_peers else {}
    calls = bench.prepared(makers, label, partial(csr_deviation, given.want, pattern), TOLERANCE[dtype])
    times = bench.interleaved({"bsrgemm": call} | given.dense | calls, label)
    seconds, reference = times["bsrgemm"], times.get("dense")
    flops = 2.0 * pattern.data.size * n
    rate, dense = flops / seconds / 1e12, reference and 2.0 * n**3 / reference / 1e12
    ratio = dense and rate / dense
    theirs = {name: flops / times[name] / 1e12 if name in times else None for name in makers}
    reached = None if target is None or ratio is None else ratio >= target
    beside = "".join(f" | {name} {number(other, 6, 2)}" for name, other in theirs.items())
    table.add(
        f"{label} | {seconds * 1e3:8.3f} ms {rate:8.3f} TFLOP/s | dense {number(dense, 8, 3)} {number(ratio, 6, 3)} | "
        f"{number(target, 4, 2)} {mark(reached):3}{beside}",
        n=n, block=(b, b), density=pattern.density, dtype=dtype, layout=layout, blocks=len(pattern.data), flops=flops,
        seconds=seconds, tflops=rate, dense_tflops=dense, ratio=ratio, peers=theirs, target=target,
        target_of="dense", reached=reached,
    )  # fmt: skip


def section_table(bench: Bench, table: Table) -> None:
    """Blocks and layouts."""
    for dtype, blocks in BLOCKS.items():
        bench.release()
        given = Operands.of(bench, SIDES[bench.device][dtype], dtype)
        for b in bench.some(list(blocks), list(blocks)[:1]):
            for layout in given.layouts:
                add = partial(line, bench, table, b, dtype, layout, given, bench.target(blocks[b]))
                bench.guarded(table, f"{b} {dtype} {layout}", add)


SECTIONS: Sections = {"table": ("X @ Y on the blocks of a pattern", section_table)}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    Script("sddmm", __doc__, SECTIONS).main(argv)
