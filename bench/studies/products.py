"""Products of a block-sparse matrix with many columns, and of small blocks with a vector or a few; sparse results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ..cases.products import EACH, Product
from ..cases.sparse import Sampled, Square
from ..data import PATTERNS, widen
from ..measure import Row, Run, reason_of
from ..peers.products import dense
from ..place import Place
from ..report import BANDWIDTH, RATE, ROOF, TIME, USUAL, Peers, error, field, times
from ..study import Sizes, Study, of_cases

#: Rows and columns of A where a study does not vary them
SIDE = 8192
_DENSITIES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0)
#: (n, density, columns of B); the larger, the sparser, so that all operands fit
_SIZES = ((4096, 0.22, 4096), (16384, 0.10, 16384), (32768, 0.05, 8192), (65536, 0.02, 8192))


def gemm(block: int | tuple[int, int], density: float = 0.22, kind: str = "float16", **more: Any) -> Product:
    """A product of the usual size, or of the next smaller one that has whole blocks."""
    R, C = (block, block) if isinstance(block, int) else block
    n = more.pop("n", SIDE)
    return Product(n if n % (R * C) == 0 or n % R == n % C == 0 else 8160, (R, C), density, more.pop("columns", n),
                   kind, **more)  # fmt: skip


def _small(place: Place) -> list[Product]:
    """The same on a CPU."""
    small = partial(gemm, n=1024, columns=128, kind="float32")
    found = [small(64), small(32), small(16), small(64, kind="float16"), small(32, kind="float64")]
    return found if place.quick else [*found, *(small(b, d) for b in (64, 16) for d in (0.05, 0.5, 1.0))]


def table(place: Place) -> list[Product]:
    """Block sizes, densities, kinds of numbers, beside everybody."""
    if not place.on_gpu:
        return _small(place)
    headline = [gemm(b, back_to_back=True) for b in (128, 64, 32, 16)]
    float64 = gemm(32, kind="float64", n=4096)
    if place.quick:
        return [*headline, float64]
    lonely: dict[str, Any] = {"beside": ("cuBLAS", "cuBLAS float16")}
    return [
        *headline,
        *(gemm(b, pattern="bernoulli", **lonely) for b in (128, 64, 32, 16)),
        *(gemm(64, d) for d in (0.50, 0.10, 0.05)),
        gemm(128, 1.0, **lonely),
        gemm(128, kind="e4m3", **lonely),
        gemm(128, kernel="GemmSm80", **lonely),
        *(gemm(block, **lonely) for block in ((256, 128), (128, 64), (96, 96), (48, 80), (80, 80), (160, 160))),
        gemm(64, columns=256),
        gemm(128, 0.10, n=16384),
        gemm(64, kind="bfloat16"),
        gemm(32, kind="tf32"),
        gemm(32, kind="float32"),
        float64,
    ]


def table_sized(place: Place, sizes: Sizes) -> list[Product]:
    usual = (SIDE, 8192, "float16") if place.on_gpu else (1024, 128, "float32")
    found = product(
        sizes.size or usual[:1], sizes.block or (64,), sizes.density or (0.22,), sizes.columns or usual[1:2],
        sizes.dtype or usual[2:],
    )  # fmt: skip
    return [Product(n, (b, b), d, N, kind) for n, b, d, N, kind in found if place.on_gpu or kind != "e4m3"]


def by_density(place: Place) -> list[Product]:
    blocks = place.some((128, 64, 32, 16), (128, 64))
    densities = place.some(_DENSITIES, (0.1, 0.4, 0.7, 1.0))
    return [gemm(b, d, beside=("cuBLAS",)) for b in blocks for d in densities]


def by_columns(place: Place) -> list[Product]:
    counts = place.some([1 << k for k in range(16)], (1, 16, 256, 4096))
    return [gemm(b, columns=N, beside=()) for b in place.some((64, 128), (64,)) for N in counts]


def by_size(place: Place) -> list[Product]:
    shapes = place.some(_SIZES, _SIZES[:1])
    return [Product(n, (b, b), d, N, beside=("cuBLAS",)) for n, d, N in shapes for b in (128, 64)]


def by_pattern(place: Place) -> list[Product]:
    """Uneven rows beside even ones with as many blocks; A.T @ B, B @ A and batches beside A @ B."""
    few = ("power-law", "arrowhead")
    usual = tuple(name for name in PATTERNS if "near" not in name and name != "mesh")
    kinds = {128: place.some(usual, few), 64: place.some((*few, "one dense row", "half empty"), ())}
    found = []
    for block in place.some((128, 64), (128,)):
        found += [gemm(block, pattern=name, beside=("even rows",)) for name in kinds[block]]
        found += [gemm(block, form=form, beside=("A @ B",)) for form in ("A.T @ B", "B @ A", "batch")]
    return found


def accuracy(run: Run) -> Iterator[Row]:
    """Error against float64 (float64 against long double), beside that of a dense product of the same numbers."""
    kinds = ("float16", "bfloat16", "float32", "tf32", "float64") if run.place.on_gpu else ("float32", "float64")
    blocks = {"float16": (128, 64, 32, 16), "bfloat16": (128, 64)}
    for kind in kinds:
        for block in run.place.some(blocks.get(kind, (32,)), (32,)):
            n = 2048 if run.place.on_gpu else 512
            row: Row = {"what": f"{kind}, {block} x {block}"}
            try:
                ours, theirs = _errors(Product(n, (block, block), 0.22, n, kind), run.place)
                row |= {"ours": ours, "theirs": theirs, "ratio": ours / theirs if theirs else None}
            except Exception as reason:
                row["failed"] = reason_of(reason)
            yield row


def _errors(case: Product, place: Place) -> tuple[float, float]:
    """max |C - exact| / (|A| |B|), elements without products left out, of ours and of BLAS."""
    xp, A, B = place.xp, case.matrix(place), case.right(place)
    ours = case.call(A, B, xp)()
    full = xp.zeros((case.n // case.block[0], case.block[0], case.n // case.block[1], case.block[1]))
    for row, (start, end) in enumerate(zip(A.indptr[:-1].tolist(), A.indptr[1:].tolist(), strict=True)):
        full[row][:, A.indices[start:end]] = widen(A.data[start:end]).transpose(1, 0, 2)
    full = full.reshape(case.n, case.n)
    stored = full if case.kind == "float64" else full.astype(np.float32).astype(A.dtype)
    theirs = dense(stored, B, xp.empty_like(ours), case.kind == "tf32")()
    wide: list[Any] = [full, widen(B), widen(ours), widen(theirs)]
    if case.kind == "float64":  # needs more digits than the GPU has, so only a few rows are checked
        some = (full[:32], B, ours[:32], theirs[:32])
        wide = [(x if isinstance(x, np.ndarray) else x.get()).astype(np.longdouble) for x in some]
    a, b, *got = wide
    exact, size = a @ b, abs(a) @ abs(b)
    first, second = (float((abs(x - exact)[size > 0] / size[size > 0]).max()) for x in got)
    return first, second


_ACCURACY = (field("bsrgemm", "ours", error), field("dense BLAS", "theirs", error), field("ratio", "ratio", times))


def spmv(place: Place, block: int | tuple[int, int], kind: str = "float64", columns: int = 1, **more: Any) -> Product:
    """Rows of 27 small blocks near the diagonal; fewer rows where blocks are large."""
    R, C = (block, block) if isinstance(block, int) else block
    most = 36 if columns == 1 else 64
    rows = int((300_000 if place.on_gpu else 20_000) * min(1, most / (R * C)))
    rows = rows - rows % (R * C) if R != C else rows  # as many rows as columns of elements
    n = rows * R
    return Product(n, (R, C), EACH * C / n, columns, kind, **({"pattern": "near diagonal"} | more))


def vectors(place: Place) -> list[Product]:
    sides = place.some((2, 3, 4, 5, 6, 8), (3, 6) if place.on_gpu else (3,))
    kinds = place.some(("float64", "float32"), ("float64",))
    found = [spmv(place, b, kind) for kind in kinds for b in sides]
    return [*found, spmv(place, 3, columns=16)] if place.quick else found


def vectors_sized(place: Place, sizes: Sizes) -> list[Product]:
    found = []
    for b, kind, N in product(sizes.block or (3,), sizes.dtype or ("float64",), sizes.columns or (1,)):
        usual = spmv(place, b, kind, N)
        for n in sizes.size or (usual.n,):
            n -= n % b
            densities = sizes.density or (EACH * b / n,)
            found += [replace(usual, n=n, density=d) for d in densities if kind not in ("e4m3", "tf32")]
    return found


def vectors_blocks(place: Place) -> list[Product]:
    every = [*((b, b) for b in range(1, 17)), (2, 3), (3, 2), (6, 3), (3, 6), (1, 16), (16, 1), (13, 11)]
    return [spmv(place, block, beside=()) for block in place.some(every, [(1, 1), (3, 3), (13, 11)])]


def vectors_columns(place: Place) -> list[Product]:
    wide = [(b, "float64") for b in (3, 4, 6, 8, 16, 32, 64)] + [(3, "float32"), (16, "float32")]
    return [spmv(place, b, kind, 16) for b, kind in place.some(wide, [(3, "float64"), (16, "float64")])]


def vectors_uneven(place: Place) -> list[Product]:
    names = [name for name in PATTERNS if "near the diagonal" in name]
    found = [spmv(place, 3, pattern=name, beside=("even rows",)) for name in names]
    return [*found, spmv(place, 3, form="A.T @ B", beside=("A @ B",))]


def squares(place: Place) -> list[Square]:
    sides = place.some((8192, 16384), (8192,)) if place.on_gpu else (1024,)
    return [Square(n, b, planned=planned) for n in sides for b in (128, 64) for planned in (False, True)]


def meshes(place: Place) -> list[Square]:
    # cupyx may have too little memory for the large one
    return [Square(cells=cells) for cells in (place.some((30, 60), (30,)) if place.on_gpu else (6, 10))]


def sampled(place: Place) -> list[Sampled]:
    blocks = {"float16": (128, 64, 32, 16), "float32": (128, 32), "tf32": (128, 32), "float64": (128, 32)}
    if not place.on_gpu:
        blocks = {"float16": (128, 64), "float32": (128, 32), "float64": (128, 32)}
    found = []
    for kind, sides in blocks.items():
        n = (8192 if kind == "float16" else 4096) if place.on_gpu else 512
        layouts = ("row", "column")
        found += [Sampled(n, b, kind, layout) for b in place.some(sides, sides[:1]) for layout in layouts]
    return found


STUDIES: tuple[Study, ...] = (
    of_cases("products", "A @ B, block-sparse A, dense B", table, sized=table_sized),
    of_cases("products-density", "A @ B by density, beside a dense product", by_density, devices=("cuda",)),
    of_cases("products-columns", "A @ B by columns of B", by_columns, (TIME, RATE, BANDWIDTH, ROOF), devices=("cuda",)),
    of_cases("products-size", "A @ B by size", by_size, devices=("cuda",)),
    of_cases("products-patterns", "A @ B by pattern, beside even rows; A.T @ B, B @ A, batches", by_pattern,
             devices=("cuda",)),
    Study("products-error", "A @ B, max |C - exact| / (|A| |B|), density 0.22", accuracy, _ACCURACY),
    of_cases("vectors", "A @ x, rows of 27 small blocks", vectors, (TIME, BANDWIDTH, ROOF, Peers()),
             sized=vectors_sized),
    of_cases("vectors-blocks", "A @ x by block, float64", vectors_blocks, (TIME, BANDWIDTH, ROOF)),
    of_cases("vectors-columns", "the same matrices by 16 columns", vectors_columns, (TIME, BANDWIDTH, ROOF, Peers())),
    of_cases("vectors-uneven", "A @ x on rows of different lengths, and A.T @ x", vectors_uneven,
             (TIME, BANDWIDTH, Peers())),
    of_cases("squares", "A @ A, random blocks", squares, USUAL),
    of_cases("meshes", "A @ A, 3 x 3 blocks of a mesh", meshes, (TIME, RATE, Peers())),
    of_cases("sampled", "X @ Y on the blocks of a pattern (bg.sddmm)", sampled, USUAL),
)  # fmt: skip
