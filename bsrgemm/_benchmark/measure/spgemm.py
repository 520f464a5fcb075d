"""A @ A for a block-sparse A: how fast, beside dense cuBLAS, cupyx's CSR, warp (warp-lang) and SciPy.

blocks: random blocks of 128 and 64, float16, n = 8192 and 16384, density .22. Rate = 2 * pairs that meet * side^3 over
time, of the whole call and of its products alone, when it is known which blocks meet. mesh: 3 x 3 blocks in float64
between the nodes of 60 x 60 x 60 hexahedra, 27 neighbours; cupyx may have too little memory for the large one, so
that a smaller one comes first. The whole call waits for the GPU, so that the time of the host
is in it. Without a GPU the same runs on the CPU, smaller.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import bsrgemm as bg

from .. import internals
from ..cases.small_blocks import as_csr, as_scipy
from ..checks.products import TOLERANCE, block_rows, exact
from ..patterns import pattern_of
from ..peers import products as product_peers
from ..random_data import normal, widen
from ..runner import Bench, Makers, Script, Sections, checked, mark, number
from ..table import Table
from ..timing import Call

DENSITY = 0.22
#: {rows and columns of A, side of a block, TFLOP/s of the products alone to be reached}
BLOCKS: dict[str, list[tuple[int, int, float | None]]] = {
    "cpu": [(1024, 128, None), (1024, 64, None)],
    "cuda": [(8192, 128, 400.0), (16384, 128, 400.0), (8192, 64, None), (16384, 64, None)],
}
#: Hexahedra along an edge, and how many times as fast as cupyx
MESHES = {"cpu": (6, 10), "cuda": (30, 60)}
TARGET_MESH = 5.0
#: Rows of a dense product that are checked
CHECKED = 64


def pairs_of(A: Any) -> int:
    """Pairs of blocks whose product is part of A @ A."""
    return int((A.indptr[1:] - A.indptr[:-1])[A.indices].sum())


def dense_of(xp: Any, data: Any, rows: Any, cols: Any, side: int) -> Any:
    """Blocks at their positions in a square matrix, in float64."""
    count, b, _ = data.shape
    tiles = xp.zeros((side // b, side // b, b, b))
    if count:
        tiles[rows, cols] = widen(data)
    return tiles.transpose(0, 2, 1, 3).reshape(side, side)


# ------------------------------------------------------------------------------------------ blocks
def random_matrix(xp: Any, n: int, b: int) -> Any:
    """A matrix of random blocks, as many in each block row."""
    pattern = pattern_of("uniform", n, (b, b), DENSITY)
    lists = (xp.asarray(x.astype(np.int32)) for x in (pattern.indices, pattern.indptr))
    return bg.bsr_array((normal((pattern.blocks, b, b), "float16", xp), *lists), shape=(n, n))


def dense_square(bench: Bench, n: int) -> dict[str, Call]:
    """The square of a dense matrix of random numbers: zeros draw less power and would flatter BLAS."""
    kind, name = ("float16", "cuBLAS") if bench.on_gpu else ("float32", "dense BLAS")
    full = normal((n, n), kind, bench.xp)
    rows = slice(0, CHECKED)

    def make() -> Call:
        if not bench.on_gpu:
            return partial(np.matmul, full, full)
        return product_peers.dense_cublas(full, full, bench.xp.empty_like(full))

    def off(got: Any) -> float:
        return float(abs(widen(got[rows]) - widen(full[rows]) @ widen(full)).max()) / n**0.5

    return bench.prepared({name: make}, "dense", off, TOLERANCE[kind])


def block_lines(bench: Bench, table: Table, n: int, b: int, target: float | None) -> None:
    """The whole call, and its products alone."""
    bench.release()
    xp = bench.xp
    A = random_matrix(xp, n, b)
    D = dense_of(xp, A.data, block_rows(A), A.indices, n)
    want, norms = D @ D, xp.sqrt((D * D).sum(axis=1))[:, None]
    products, result_blocks = internals.square_products(A, bench.device)
    pattern = A @ A

    def off(data: Any, rows: Any, cols: Any) -> float:
        return float((xp.abs(dense_of(xp, data, rows, cols, n) - want) / norms).max())

    def whole_off(C: Any) -> float:
        return off(C.data, block_rows(C), C.indices)

    def products_off(data: Any) -> float:
        return off(data, block_rows(pattern), pattern.indices)

    pairs, dense = pairs_of(A), dense_square(bench, n)
    flops = 2.0 * pairs * b**3
    lines: list[tuple[str, Call, Any, float | None]] = [
        ("A @ A", lambda: A @ A, whole_off, None),
        ("products alone", products, products_off, target),
    ]
    for what, call, error, least in lines:
        label = f"{n:5} {b:4} {what:14}"
        if not bench.verified(table, label, call, error, TOLERANCE["float16"]):
            continue
        times = bench.interleaved({"bsrgemm": call} | dense, label)
        seconds = times.pop("bsrgemm")
        rate = flops / seconds / 1e12
        reached = None if least is None else rate >= least
        beside = "".join(f" | {name} {number(taken * 1e3, 8, 3)} ms" for name, taken in times.items())
        table.add(
            f"{label} | {seconds * 1e3:8.3f} ms {rate:8.3f} TFLOP/s | {number(least, 5, 0)} {mark(reached):3}{beside}",
            what=what, n=n, block=(b, b), density=DENSITY, dtype="float16", blocks=len(A.data), pairs=pairs,
            result_blocks=result_blocks, flops=flops, seconds=seconds, tflops=rate, peers=times, target=least,
            target_of="TFLOP/s", reached=reached,
        )  # fmt: skip


def section_blocks(bench: Bench, table: Table) -> None:
    """Random blocks in float16."""
    for n, b, target in BLOCKS[bench.device]:
        bench.guarded(table, f"{n} {b}", partial(block_lines, bench, table, n, b, bench.target(target)))


# -------------------------------------------------------------------------------------------- mesh
def mesh_matrix(xp: Any, cells: int) -> Any:
    """3 x 3 blocks of random numbers between the nodes of cells x cells x cells hexahedra that share one."""
    side = cells + 1
    node, step = xp.arange(side**3), xp.arange(-1, 2)
    near = xp.ones((len(node), 3, 3, 3), bool)
    for axis, place in enumerate((node // side**2, node // side % side, node % side)):
        there = (place[:, None] + step >= 0) & (place[:, None] + step < side)
        near &= there.reshape(-1, *(3 if axis == k else 1 for k in range(3)))
    offset = (step[:, None, None] * side + step[:, None]) * side + step
    cols = (node[:, None] + offset.reshape(-1))[near.reshape(-1, 27)].astype(np.int32)
    ends = xp.cumsum(near.reshape(-1, 27).sum(axis=1))
    indptr = xp.concatenate([xp.zeros(1, np.int32), ends.astype(np.int32)])
    return bg.bsr_array((normal((len(cols), 3, 3), "float64", xp), cols, indptr), shape=(3 * side**3, 3 * side**3))


def mesh_peers(bench: Bench, A: Any) -> Makers:
    def squared(S: Any) -> Call:
        return partial(operator.matmul, S, S)

    if not bench.on_gpu:
        return {"scipy bsr": lambda: squared(as_scipy(A)), "scipy csr": lambda: squared(as_csr(A))}
    return {"cupyx csr": lambda: squared(as_csr(A))}


def warp_call(bench: Bench, label: str, A: Any, error: Callable[[bg.bsr_array], float]) -> dict[str, Call]:
    """The call of warp, whose matrices are not ours and which has a pool of its own."""
    if not bench.on_gpu or not bench.with_peers:
        return {}

    def make() -> Call:
        call = product_peers.warp_bsr_bsr(A, A)
        return checked(call, lambda C: error(product_peers.from_warp(C)), TOLERANCE["float64"])

    call = bench.attempt("warp", label, make)
    return {} if call is None else {"warp": call}


def mesh_line(bench: Bench, table: Table, cells: int, target: float | None) -> None:
    """A @ A beside CSR and warp."""
    bench.release()
    A = mesh_matrix(bench.xp, cells)
    label = f"{f'{cells} x {cells} x {cells}':>12} {A.shape[0]:8,} rows"
    signs = bench.xp.asarray(np.random.default_rng(1).choice([-1.0, 1.0], A.shape[1]))
    want = exact(A, exact(A, signs))

    def off(C: Any) -> float:
        """Over the size of an element of A A s: 27 blocks of 3 columns, twice."""
        got = exact(C, signs) if isinstance(C, bg.bsr_array) else C @ signs
        return float(abs(got - want).max()) / (27 * 3)

    if not bench.verified(table, label, lambda: A @ A, off, TOLERANCE["float64"]):
        return
    makers = mesh_peers(bench, A)
    calls = bench.prepared(makers, label, off, TOLERANCE["float64"]) | warp_call(bench, label, A, off)
    times = bench.interleaved({"bsrgemm": lambda: A @ A} | calls, label)
    names = [*makers, "warp"] if bench.on_gpu else list(makers)
    seconds, theirs = times["bsrgemm"], {name: times.get(name) for name in names} if bench.with_peers else {}
    pairs = pairs_of(A)
    fastest = min((taken for taken in theirs.values() if taken), default=None)
    ratio = fastest and fastest / seconds
    csr = theirs.get("cupyx csr")
    reached = None if target is None or csr is None else csr / seconds >= target
    beside = "".join(f" | {name} {number(taken and taken * 1e3, 9, 2)} ms" for name, taken in theirs.items())
    table.add(
        f"{label} | {seconds * 1e3:9.2f} ms{beside} | {number(ratio, 6, 2)} x | {number(target, 3, 0)} {mark(reached)}",
        cells=cells, n=A.shape[0], block=(3, 3), dtype="float64", blocks=len(A.data), pairs=pairs,
        flops=2.0 * pairs * 27, seconds=seconds, peers=theirs, ratio=ratio, target=target, target_of="cupyx csr",
        reached=reached,
    )  # fmt: skip


def section_mesh(bench: Bench, table: Table) -> None:
    """3 x 3 blocks of a mesh."""
    meshes = MESHES[bench.device]
    for cells in bench.some(meshes, meshes[:1]):
        target = bench.target(TARGET_MESH)
        bench.guarded(table, f"{cells} x {cells} x {cells}", partial(mesh_line, bench, table, cells, target))


SECTIONS: Sections = {
    "blocks": ("A @ A, random blocks, float16, density .22", section_blocks),
    "mesh": ("A @ A, 3 x 3 blocks of a mesh of hexahedra, float64", section_mesh),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    Script("spgemm", __doc__, SECTIONS, "all").main(argv)
