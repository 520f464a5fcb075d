"""A @ A for a block-sparse A: how fast, beside dense cuBLAS, cupyx's CSR, warp (warp-lang) and SciPy.

blocks: random blocks of 128 and 64, float16, n = 8192 and 16384, density .22. Rate = 2 * pairs that meet * side^3 over
time, of the whole call and of its products alone, when it is known which blocks meet. mesh: 3 x 3 blocks in float64
between the nodes of 60 x 60 x 60 hexahedra, 27 neighbours; cupyx may find no room for the products of the large one, so
that a smaller one comes first. Medians by CUDA events, L2 flushed by reading, 0.25 s of idling before each timing; the
whole call waits for the GPU, so that the time of the host is in it. Without a GPU the same runs on the CPU, smaller.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import science_cases as cases
from harness import Table
from report import Sections, mark, number
from science_cases import Bench, Makers, as_csr, as_scipy, block_rows, exact, guarded, measured, peer_seconds

import bsrgemm as bg
from bsrgemm._backend import registry, structure
from bsrgemm._benchmark import product_peers
from bsrgemm._benchmark.patterns import pattern_of
from bsrgemm._benchmark.product_peers import dense_cublas
from bsrgemm._benchmark.random_data import normal, widen
from bsrgemm._benchmark.timing import Call

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
    """SpgemmSimt of blocks that meet in A @ A."""
    return int((A.indptr[1:] - A.indptr[:-1])[A.indices].sum())


def dense_of(xp: Any, data: Any, rows: Any, cols: Any, side: int) -> Any:
    """Blocks at their places in a square matrix, in float64."""
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


def dense_seconds(bench: Bench, n: int) -> dict[str, float | None]:
    """The same of a dense matrix of random numbers: zeros draw less power and would flatter BLAS."""
    kind, name = ("float32", "dense BLAS") if bench.device == "cpu" else ("float16", "cuBLAS")
    full = normal((n, n), kind, bench.xp)
    rows = slice(0, CHECKED)

    def make() -> Call:
        if bench.device == "cpu":
            return partial(np.matmul, full, full)
        return dense_cublas(full, full, bench.xp.empty_like(full))

    def off(got: Any) -> float:
        return float(abs(widen(got[rows]) - widen(full[rows]) @ widen(full)).max()) / n**0.5

    return peer_seconds(bench, "dense", {name: make}, off, kind)


def block_lines(bench: Bench, table: Table, n: int, b: int, target: float | None) -> None:
    """The whole call, and its products alone."""
    bench.release()
    xp = bench.xp
    A = random_matrix(xp, n, b)
    D = dense_of(xp, A.data, block_rows(A), A.indices, n)
    want, norms = D @ D, xp.sqrt((D * D).sum(axis=1))[:, None]
    backend, blocks, pairs = registry.by_name(bench.device), structure.Blocks(A.data, A.indices, A.indptr), pairs_of(A)
    left, right, starts, *_ = backend.product_pattern(blocks, blocks, n // b)
    pattern = A @ A

    def off(data: Any, rows: Any, cols: Any) -> float:
        return float((xp.abs(dense_of(xp, data, rows, cols, n) - want) / norms).max())

    def whole_off(C: Any) -> float:
        return off(C.data, block_rows(C), C.indices)

    def products_off(data: Any) -> float:
        return off(data, block_rows(pattern), pattern.indices)

    flops = 2.0 * pairs * b**3
    dense = dense_seconds(bench, n)
    beside = "".join(f" | {name} {number(taken and taken * 1e3, 8, 3)} ms" for name, taken in dense.items())
    products = partial(backend.pair_products, A.data, left, A.data, right, starts, A.dtype, n // b)
    lines: list[tuple[str, Call, Any, float | None]] = [
        ("A @ A", lambda: A @ A, whole_off, None),
        ("products alone", products, products_off, target),
    ]
    for what, call, error, least in lines:
        label = f"{n:5} {b:4} {what:14}"
        seconds = measured(bench, table, label, call, error, "float16")
        if seconds is None:
            continue
        rate = flops / seconds / 1e12
        reached = None if least is None else rate >= least
        table.add(
            f"{label} | {seconds * 1e3:8.3f} ms {rate:8.3f} TFLOP/s | {number(least, 5, 0)} {mark(reached):3}{beside}",
            what=what, n=n, block=(b, b), density=DENSITY, dtype="float16", blocks=len(A.data), pairs=pairs,
            result_blocks=len(starts), flops=flops, seconds=seconds, tflops=rate, peers=dense, target=least,
            target_of="TFLOP/s", reached=reached,
        )  # fmt: skip


def section_blocks(bench: Bench, table: Table) -> None:
    """Random blocks in float16."""
    for n, b, target in BLOCKS[bench.device]:
        guarded(bench, table, f"{n} {b}", partial(block_lines, bench, table, n, b, bench.target(target)))


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

    if bench.device == "cpu":
        return {"scipy bsr": lambda: squared(as_scipy(A)), "scipy csr": lambda: squared(as_csr(A))}
    return {"cupyx csr": lambda: squared(as_csr(A))}


def warp_seconds(bench: Bench, label: str, A: Any, error: Callable[[bg.bsr_array], float]) -> dict[str, float | None]:
    """Seconds of warp, whose matrices are not ours and which has a pool of its own."""
    if bench.device == "cpu":
        return {}
    bench.release()
    makers: Makers = {"warp": lambda: product_peers.warp_bsr_bsr(A, A)}
    return peer_seconds(bench, label, makers, lambda C: error(product_peers.from_warp(C)), "float64")


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

    seconds = measured(bench, table, label, lambda: A @ A, off, "float64")
    if seconds is None:
        return
    theirs = peer_seconds(bench, label, mesh_peers(bench, A), off, "float64")
    theirs |= warp_seconds(bench, label, A, off)
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
        guarded(bench, table, f"{cells} x {cells} x {cells}", partial(mesh_line, bench, table, cells, target))


SECTIONS: Sections = {
    "blocks": ("A @ A, random blocks, float16, density .22", section_blocks),
    "mesh": ("A @ A, 3 x 3 blocks of a mesh of hexahedra, float64", section_mesh),
}


def main(argv: Sequence[str] | None = None) -> None:
    cases.run("spgemm", __doc__, SECTIONS, "all", argv, idle=0.25)


if __name__ == "__main__":
    main()
