"""What `cliffs` measures: one call over the whole surface, beside what a user would do otherwise.

Operands are made where they are used, and checks need no lists of blocks: a product is compared with the dense matrix
by a vector of signs, which sees every row and every column.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

import bsrgemm as bg

from .cases.attention import Attention, Gradients
from .cases.case import Case, Error, Peer, Ready
from .cases.products import _BATCH
from .checks import TOLERANCE, Seen, signs, with_signs
from .data import CHUNK, as_csr, stored_dtype, widen, zipf_lengths
from .peers import products as peers
from .place import Call, Place

ORDERS = ("C", "F", "offset", "pitch")
SIDES = ("A @ B", "A.T @ B", "B @ A", "B @ A.T", "batch")
PATTERNS = ("uniform", "band", "power law", "one full row", "empty rows")
#: The largest error of a product over the root of the number of terms; sums of integers are exact
ALLOWED = {kind: allowed.product for kind, allowed in TOLERANCE.items()}
ALLOWED |= {"complex64": 2e-5, "complex128": 2e-12, "int8": 1e-9}
#: Our own call with the nearest sizes that are known to be fast
FRIENDLY = "friendly"
#: Names of calls of our own that cases time beside themselves, and that are no alternatives
_NO_ALTERNATIVES = {"any order", "forward pass", "portable", "portable, any order", "all keys", "full", "float16"}
#: CSR is an alternative up to this side of a block, number of columns, and number of multiplications
_CSR_BLOCK, _CSR_COLUMNS, _CSR_MOST = 16, 64, 1 << 30
#: Elements between the rows of an operand with padded rows
_GAP = 16
#: Kinds of attention that tensor cores compute
_ON_TENSOR_CORES = ("float16", "bfloat16", "e4m3")
#: Rows of a sampled product that are compared
_ROWS_CHECKED = 256


@dataclass(frozen=True)
class Cell:
    """A case of one part of the surface, beside its own alternatives and the friendly case next to it."""

    part: str
    case: Case
    friend: Case
    #: seconds of a call that do not depend on its work: what launches and the first and last bytes take
    launch: float = 0.0

    def __str__(self) -> str:
        return str(self.case)

    @property
    def kind(self) -> str:
        return self.case.kind

    @property
    def flops(self) -> float:
        return self.case.flops

    @property
    def moved(self) -> float:
        return self.case.moved

    @property
    def memory(self) -> float:
        return self.case.memory + self.friend.memory

    @property
    def work(self) -> float:
        """The work of the case over that of its friend: operations or bytes, whichever is more."""
        return max(_operations(self.case) / _operations(self.friend), self.case.moved / self.friend.moved)

    def share(self, seconds: float) -> float:
        """The share of the friend's seconds that the case may take; of a launch nothing is saved by less work.

        >>> case = AttentionCell(1, 2, 64, 64)
        >>> cell = Cell("attention", case, replace(case, head_dim=128), launch=8e-6)
        >>> cell.work, cell.share(8e-6), cell.share(16e-6), round(cell.share(8e-3), 2)
        (0.5, 1.0, 0.75, 0.5)
        """
        fixed = min(1.0, self.launch / seconds) if seconds > 0 else 0.0
        return self.work if self.work >= 1 else fixed + (1 - fixed) * self.work

    def ready(self, place: Place) -> Ready:
        found = self.case.ready(place)
        found.peers = {name: make for name, make in found.peers.items() if name not in _NO_ALTERNATIVES}
        if self.friend != self.case:
            found.peers[FRIENDLY] = lambda: Peer(self.friend.ready(place).call, judged=False)
        return found


def _operations(case: Case) -> float:
    """Operations of a case. The exponential of a score takes as long as its products with 64 columns on tensor cores.

    >>> [_operations(AttentionCell(1, 1, 64, D)) / 64**2 for D in (32, 64, 128)]
    [256.0, 256.0, 512.0]
    """
    of = case.of if isinstance(case, Gradients) else case
    if not isinstance(of, Attention) or of.kind not in _ON_TENSOR_CORES:
        return case.flops
    return case.flops * max(1.0, 64 / of.head_dim)


# ------------------------------------------------------------------------------------------ operands
def lay(make: Callable[[tuple[int, ...]], Any], shape: tuple[int, ...], order: str) -> Any:
    """A new array in C or Fortran order, one element behind its alignment ("offset"), or with padded rows ("pitch").

    >>> lay(np.empty, (4, 3), "F").strides, lay(np.empty, (4, 3), "pitch").strides
    ((8, 32), (152, 8))
    """
    if order == "offset":
        return make((math.prod(shape) + 1,))[1:].reshape(shape)
    if order == "C" or len(shape) == 1:
        return make(shape)
    *outer, rows, columns = shape
    if order == "F":
        return make((*outer, columns, rows)).swapaxes(-1, -2)
    return make((*outer, rows, columns + _GAP))[..., :columns]


def _noise(rows: int, columns: int, xp: Any) -> Any:
    """Numbers from 0 to 1 that depend on their position alone: the same on every machine (the mixer of MurmurHash3)."""
    x = xp.arange(1, rows * columns + 1, dtype=np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    return (x >> np.uint32(8)).astype(np.float32).reshape(rows, columns) / np.float32(1 << 24)


def up(count: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-count // unit) * unit


def friendly_side(side: int) -> int:
    """The side of a block that is known to be fast.

    >>> [friendly_side(b) for b in (1, 16, 24, 100, 129)]
    [16, 16, 32, 128, 256]
    """
    return next(b for b in (16, 32, 64, 128, 256) if b >= side)


@dataclass(frozen=True, kw_only=True)
class OfBlocks:
    """What all cells with a block-sparse matrix have."""

    kind: str
    block: tuple[int, int]
    shape: tuple[int, int]
    density: float
    pattern: str = "uniform"

    def __str__(self) -> str:
        (R, C), (M, K) = self.block, self.shape
        return f"{self.kind} {R} x {C}, {M} x {K}, {self.pattern} {self.density:g}"

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return stored_dtype(self.kind).itemsize

    @property
    def expected(self) -> float:
        """The share of the elements that is stored, about."""
        return min(1.0, max(self.density, self.block[1] / self.shape[1]))

    @property
    def elements(self) -> float:
        """Elements that are stored, about."""
        return self.expected * math.prod(self.shape)

    def stored_bytes(self, elements: float) -> float:
        """Bytes of so many elements in blocks, with their column indices."""
        return elements * (self.size + 4 / math.prod(self.block))

    def friendly(self, turned: bool = False) -> dict[str, Any]:
        """The fields of a matrix of about this size with blocks of a power of two and rows of equal lengths."""
        block, shape = (x[::-1] if turned else x for x in (self.block, self.shape))
        block = friendly_side(block[0]), friendly_side(block[1])
        rows, columns = (max(1, round(n / b)) * b for n, b in zip(shape, block, strict=True))
        return {"kind": self.kind, "block": block, "shape": (rows, columns), "density": self.expected}

    def stored(self, xp: Any) -> Any:
        """Which blocks are stored: a boolean matrix with at least one."""
        rows, columns = (n // b for n, b in zip(self.shape, self.block, strict=True))
        each = max(1.0, self.density * columns)
        if self.pattern == "band":
            middle = xp.arange(rows)[:, None] * (columns / rows)
            found = abs(xp.arange(columns) - middle) <= each / 2
        else:
            lengths = np.full(rows, each)
            if self.pattern == "power law":
                lengths = np.random.default_rng(1).permutation(zipf_lengths(rows, columns, int(rows * each)))
            elif self.pattern == "one full row":
                lengths[rows // 2] = columns
            elif self.pattern == "empty rows":
                lengths = np.where(np.arange(rows) % 2, 0.0, 2 * each)
            found = _noise(rows, columns, xp) < xp.asarray(lengths / columns, dtype=np.float32)[:, None]
        found[0, 0] = True
        return found

    def matrix(self, place: Place) -> Any:
        """The matrix, with random blocks."""
        xp, stored = place.xp, self.stored(place.xp)
        indptr = xp.zeros(len(stored) + 1, np.int32)
        indptr[1:] = xp.cumsum(stored.sum(axis=1))
        indices = xp.nonzero(stored)[1].astype(np.int32)
        return bg.bsr_array((place.draw((len(indices), *self.block), self.kind), indices, indptr), shape=self.shape)


# --------------------------------------------------------------------------------------------- BLAS
def for_blas(place: Place, kind: str, x: Any) -> Any:
    """An operand as BLAS takes it: fp8 as float16, int8 as float32, and on the CPU 16-bit floats as float32."""
    if kind == "e4m3":
        return widen(x).astype(np.float16 if place.on_gpu else np.float32)
    narrow = kind == "int8" or (not place.on_gpu and kind in ("float16", "bfloat16"))
    return x.astype(np.float32) if narrow else x


def blas(place: Place, kind: str, left: Any, right: Any) -> Call:
    """left @ right by BLAS, for operands of `for_blas` in any order; each matrix of a batch by itself."""
    xp = place.xp
    out = xp.empty((*right.shape[:-2], left.shape[0], right.shape[-1]), right.dtype)
    many = [
        _one(xp, kind, left, *pair) for pair in (zip(right, out, strict=True) if right.ndim == 3 else [(right, out)])
    ]

    def call() -> Any:
        for each in many:
            each()
        return out

    return call


def _one(xp: Any, kind: str, left: Any, right: Any, out: Any) -> Call:
    """One product: row-major operands by cublasGemmEx, others by `cupy.matmul`, or as copies where that has none."""
    if left.flags.c_contiguous and right.flags.c_contiguous and left.dtype.kind != "c":
        return peers.dense(left, right, out, kind == "tf32")
    if kind not in ("bfloat16", "tf32"):
        return partial(xp.matmul, left, right, out=out)
    return lambda: peers.dense(xp.ascontiguousarray(left), xp.ascontiguousarray(right), out, kind == "tf32")()


def judge(want: Any, terms: Any, kind: str, as_matrix: Callable[[Any], Any]) -> Error:
    """Compare a result, times signs, with `want`; the error of a row is over the root of the number of its terms."""

    def error(got: Any) -> float:
        off = abs(with_signs(as_matrix(got)) - want()) / terms() ** 0.5
        return float(off.max()) / ALLOWED[kind]

    return error


# ----------------------------------------------------------------------------------------- products
@dataclass(frozen=True, kw_only=True)
class ProductCell(OfBlocks):
    """A @ B on one of `SIDES`, for A of `shape` and `columns` columns of B."""

    columns: int
    side: str = "A @ B"
    #: how B and the result lie, of `ORDERS`
    orders: tuple[str, str] = ("C", "C")

    def __str__(self) -> str:
        order = "" if self.orders == ("C", "C") else ", {} to {}".format(*self.orders)
        return f"{super().__str__()}, {self.columns} columns, {self.side}{order}"

    @property
    def turned(self) -> bool:
        """Whether the product reads the transpose of A."""
        return self.side in ("A.T @ B", "B @ A")

    @property
    def left(self) -> bool:
        """Whether B is on the left."""
        return self.side.startswith("B")

    @property
    def _all_columns(self) -> int:
        return self.columns * (_BATCH if self.side == "batch" else 1)

    @property
    def _result(self) -> np.dtype[Any]:
        return np.dtype({"e4m3": np.float16, "int8": np.int32}.get(self.kind, stored_dtype(self.kind)))

    @property
    def flops(self) -> float:
        return 2.0 * self.elements * self._all_columns

    @property
    def moved(self) -> float:
        rows = self.shape[::-1] if self.turned else self.shape
        dense = rows[1] * self.size + rows[0] * self._result.itemsize
        return self.stored_bytes(self.elements) + dense * self._all_columns

    @property
    def memory(self) -> float:
        # A filled up twice and a piece of it in float64, C of each alternative, and B and C in float64
        full = math.prod(self.shape) * self.size
        return 2 * full + 16.0 * min(CHUNK, math.prod(self.shape)) + 6 * self.moved

    def dense_shape(self, rows: int) -> tuple[int, ...]:
        """The shape of B or of the result, with so many rows where B is on the right."""
        if self.columns == 1 and self.side != "batch":
            return (rows,)
        if self.left:
            return self.columns, rows
        return (_BATCH, rows, self.columns) if self.side == "batch" else (rows, self.columns)

    def operands(self, place: Place) -> tuple[Any, Any, Any]:
        """A, B and an array for the result."""
        rows = self.shape[::-1] if self.turned else self.shape
        A = self.matrix(place)
        B = lay(lambda shape: place.draw(shape, self.kind), self.dense_shape(rows[1]), self.orders[0])
        out = lay(lambda shape: place.xp.empty(shape, self._result), self.dense_shape(rows[0]), self.orders[1])
        return A, B, out

    def operand(self, A: Any) -> Any:
        """A, or its transpose."""
        return A.T if self.side in ("A.T @ B", "B @ A.T") else A

    def call(self, A: Any, B: Any, out: Any) -> Call:
        """Our product."""
        options: dict[str, Any] = {"precision": "tf32"} if self.kind == "tf32" else {}
        options |= {"scale_a": 1.0} if self.kind == "e4m3" else {}
        operands = (B, self.operand(A)) if self.left else (self.operand(A), B)
        return partial(bg.matmul, *operands, out=out, **options)

    def as_matrix(self, x: Any) -> Any:
        """B or a result as if B were one matrix on the right."""
        if x.ndim == 3:
            return x.transpose(1, 0, 2).reshape(x.shape[1], -1)
        return x.T if self.left else x

    def ready(self, place: Place) -> Ready:
        return self.ready_with(place, *self.operands(place))

    def ready_with(self, place: Place, A: Any, B: Any, out: Any) -> Ready:
        """The product with operands that are there."""

        @cache
        def filled() -> Any:
            return place.xp.ascontiguousarray(A.toarray().T) if self.turned else A.toarray()

        @cache
        def want() -> Any:
            D, x = filled(), with_signs(self.as_matrix(B))
            step = max(1, CHUNK // D.shape[1])
            return place.xp.concatenate([widen(D[i : i + step]) @ x for i in range(0, len(D), step)])

        @cache
        def terms() -> Any:
            stored = self.stored(place.xp)
            R, C = self.block
            blocks, height, width = (stored.sum(axis=0), C, R) if self.turned else (stored.sum(axis=1), R, C)
            return place.xp.maximum(width * place.xp.repeat(blocks, height), 1)

        error = judge(want, terms, self.kind, self.as_matrix)
        return Ready(self.call(A, B, out), error, self._peers(place, A, B, filled))

    def _peers(self, place: Place, A: Any, B: Any, filled: Call) -> dict[str, Callable[[], Peer]]:
        X = B[:, None] if B.ndim == 1 and not self.left else B[None] if B.ndim == 1 else B

        def as_ours(C: Any) -> Any:
            return C.reshape(-1) if B.ndim == 1 else C

        def product(full: Any, x: Any) -> Call:
            """With the matrix that is filled up, oriented as the product reads it."""
            return blas(place, self.kind, x, full.T) if self.left else blas(place, self.kind, full, x)

        def dense() -> Peer:
            full, x = (for_blas(place, self.kind, y) for y in (filled(), X))
            call = product(place.xp.ascontiguousarray(full.T).T if self.left else full, x)
            return Peer(lambda: as_ours(call()))

        def filling() -> Peer:
            x = for_blas(place, self.kind, X)

            def call() -> Any:
                full = for_blas(place, self.kind, A.toarray())
                return as_ours(product(full.T if self.turned else full, x)())

            return Peer(call)

        def csr() -> Peer:
            S = as_csr(A.T if self.turned else A)
            return Peer((lambda: (S @ B.T).T) if self.left else partial(operator.matmul, S, B))

        name = "cuBLAS" if place.on_gpu else "dense BLAS"
        found: dict[str, Callable[[], Peer]] = {name: dense, f"{name}, filling": filling}
        small = max(self.block) <= _CSR_BLOCK and self.columns <= _CSR_COLUMNS and self.flops <= 2 * _CSR_MOST
        if small and self.side != "batch" and self.kind in ("float32", "float64", "complex64", "complex128"):
            found["cupyx csr" if place.on_gpu else "scipy csr"] = csr
        return found

    def friend(self) -> ProductCell:
        """Blocks of a power of two, whole eights of columns, row-major and aligned, A @ B, rows of equal lengths."""
        return ProductCell(**self.friendly(self.turned), columns=up(self._all_columns, 8))


# ----------------------------------------------------------------------------------- sparse results
@dataclass(frozen=True, kw_only=True)
class SampledCell(OfBlocks):
    """X @ Y at the blocks of a pattern of `shape`, over `inner` columns of X."""

    inner: int
    #: how X and Y lie
    orders: tuple[str, str] = ("C", "C")

    def __str__(self) -> str:
        return f"{super().__str__()}, sddmm of {self.inner}, X {self.orders[0]}, Y {self.orders[1]}"

    @property
    def flops(self) -> float:
        return 2.0 * self.elements * self.inner

    @property
    def moved(self) -> float:
        dense = sum(self.shape) * self.inner * self.size
        return self.stored_bytes(self.elements) + dense

    @property
    def memory(self) -> float:
        return (
            4 * self.moved
            + math.prod(self.shape) * 3.0 * self.size
            + 24.0 * self.shape[1] * (_ROWS_CHECKED + self.inner)
        )

    def ready(self, place: Place) -> Ready:
        xp, (M, N) = place.xp, self.shape
        draw = partial(lay, lambda shape: place.draw(shape, self.kind))
        X, Y = draw((M, self.inner), self.orders[0]), draw((self.inner, N), self.orders[1])
        pattern = self.matrix(place)
        pattern.sum_duplicates()  # there are none; this call stores that
        call = partial(bg.sddmm, X, Y, pattern, precision="tf32" if self.kind == "tf32" else None)

        def error(got: Any) -> float:
            rows = xp.asarray(np.unique(np.linspace(0, M - 1, min(M, _ROWS_CHECKED)).astype(int)))
            kept = self.stored(xp)
            kept = kept[rows // self.block[0]][:, xp.arange(N) // self.block[1]]
            off = (widen(got.toarray()[rows]) - (widen(X[rows]) @ widen(Y)) * kept) @ signs(N, xp)
            terms = xp.maximum(self.inner * kept.sum(axis=1), 1)
            return float((abs(off) / terms**0.5).max()) / ALLOWED[self.kind]

        def dense() -> Peer:
            return Peer(blas(place, self.kind, *(for_blas(place, self.kind, x) for x in (X, Y))), judged=False)

        return Ready(call, error, {"cuBLAS" if place.on_gpu else "dense BLAS": dense})

    def friend(self) -> SampledCell:
        return SampledCell(**self.friendly(), inner=up(self.inner, 64))


@dataclass(frozen=True, kw_only=True)
class SparseCell(OfBlocks):
    """A @ B of two block-sparse matrices: A of `shape`, and B of the transposed shape."""

    def __str__(self) -> str:
        return f"{super().__str__()}, BSR @ BSR"

    @property
    def right(self) -> OfBlocks:
        """B."""
        return replace(self, block=self.block[::-1], shape=self.shape[::-1], pattern="uniform")

    @property
    def flops(self) -> float:
        """Of the pairs of blocks that are expected to meet."""
        return 2.0 * self.elements * self.shape[0] * self.right.expected

    @property
    def moved(self) -> float:
        M, K = self.shape
        met = 1 - (1 - self.expected * self.right.expected) ** (K // self.block[1])
        return self.stored_bytes(2 * self.elements + met * M * M)

    @property
    def memory(self) -> float:
        M, K = self.shape
        return 6 * self.moved + 3.0 * (M * M + 2 * M * K) * self.size + 32.0 * M * K

    def ready(self, place: Place) -> Ready:
        A = self.matrix(place)
        B = self.right.matrix(place)

        @cache
        def filled() -> tuple[Any, Any]:
            return A.toarray(), B.toarray()

        @cache
        def want() -> Any:
            a, b = filled()
            return widen(a) @ with_signs(b)

        @cache
        def terms() -> Any:
            each = self.right.stored(place.xp).sum(axis=1) / (self.shape[0] // self.block[0])
            met = self.stored(place.xp).astype(np.float64) @ each * self.block[1]
            return place.xp.maximum(place.xp.repeat(met, self.block[0]), 1)

        def dense() -> Peer:
            return Peer(blas(place, self.kind, *(for_blas(place, self.kind, x) for x in filled())))

        def csr() -> Peer:
            return Peer(partial(operator.matmul, as_csr(A), as_csr(B)))

        found = {"cuBLAS" if place.on_gpu else "dense BLAS": dense}
        if max(self.block) <= _CSR_BLOCK and self.flops <= _CSR_MOST and self.kind in ("float32", "float64"):
            found["cupyx csr" if place.on_gpu else "scipy csr"] = csr
        as_matrix: Callable[[Any], Any] = lambda C: C.toarray() if hasattr(C, "toarray") else C  # noqa: E731
        return Ready(partial(operator.matmul, A, B), judge(want, terms, self.kind, as_matrix), found)

    def friend(self) -> SparseCell:
        return SparseCell(**self.friendly())


# ---------------------------------------------------------------------------------------- attention
@dataclass(frozen=True)
class AttentionCell(Attention):
    """`Attention` with another number of queries, and operands whose length is in memory before the heads ("bshd")."""

    queries: int | None = None
    stored: str = "bhsd"

    def __post_init__(self) -> None:
        """Nothing is refused: blocks may be cut off at the end of a sequence."""

    def __str__(self) -> str:
        queries = f", {self.queries} queries" if self.queries else ""
        return f"{super().__str__()}{queries}{', bshd' if self.stored == 'bshd' else ''}"

    @property
    def mask_name(self) -> str:
        if self.blocks is None:
            return super().mask_name
        return f"{self.blocks[1]} of {-(-self.length // self.blocks[0])} blocks {self.blocks[0]}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.queries or self.length, self.head_dim

    @property
    def pairs(self) -> int:
        S, Q = self.length, self.shape[2]
        if self.blocks is not None:
            return Q * min(S, self.blocks[0] * self.blocks[1])
        return Q * S - (Q * (Q - 1) // 2 if self.causal else 0)

    def mask(self, place: Place) -> bg.BlockMask | None:
        if self.blocks is None:
            return None
        size, each = self.blocks
        return bg.BlockMask.random(self.shape[2], self.length, per_row=each, block=size, device=place.device)

    def seen(self, mask: bg.BlockMask | None) -> Any:
        """Which keys each query may see; the last query is at the last key."""
        ahead = self.length - self.shape[2]
        causal, blocks = Seen(self.heads, self.causal), Seen(self.heads, mask=mask)
        return lambda b, h, query, key: causal(b, h, query + ahead, key) & blocks(b, h, query, key)

    def operands(self, place: Place) -> list[Any]:
        if self.stored == "bhsd":
            return super().operands(place)
        return [place.draw((b, s, h, d), self.kind).swapaxes(1, 2) for b, h, s, d in (self.shape, *[self.kv_shape] * 2)]

    def friend(self) -> AttentionCell:
        """Heads of 64, 128 or 256, whole 128s of keys and of long queries, blocks of 128."""
        length, head_dim = up(self.length, 128), next(d for d in (64, 128, 256) if d >= self.head_dim)
        queries = None if self.queries is None else next(q for q in (1, 16, 64) if q >= self.queries)
        blocks = self.blocks and (128, max(1, min(length // 128, round(math.prod(self.blocks) / 128))))
        return replace(self, length=length, head_dim=head_dim, queries=queries, blocks=blocks, stored="bhsd")
