"""C = A B for a block-sparse A: many columns, a few, or a vector; A.T B, B A and batches."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

from bsrgemm import bsr_array, matmul

from ..checks import TOLERANCE, dense_error, product_error
from ..data import PATTERNS, Pattern, as_csr, as_scipy, even_lengths, from_lengths, near_diagonal, stored_dtype
from ..internals import forced
from ..peers import products as peers
from ..place import Call, Place
from .case import Peer, Ready, ours_too, plainly

#: The largest size in bytes of a dense A for which peers are measured, and the largest number of elements in CSR
_DENSE_MOST, _CSR_MOST = 8 << 30, 1 << 28
#: Blocks of a block row near the diagonal, as a second-order stencil in space has
EACH = 27
#: Right-hand sides of a batch
_BATCH = 4


@lru_cache(maxsize=2)
def _pattern(name: str, rows: int, columns: int, each: int) -> Pattern:
    return PATTERNS[name](rows, columns, each)


@dataclass(frozen=True)
class Product:
    """An n x n matrix of R x C blocks by n x columns."""

    n: int
    block: tuple[int, int]
    density: float
    columns: int
    kind: str = "float16"
    pattern: str = "uniform"
    #: "A @ B", "A.T @ B", "B @ A", or "batch": B in four parts
    form: str = "A @ B"
    #: name of the kernel to use, even if another one would be chosen
    kernel: str | None = None
    #: names of what is timed beside it; None is everybody who serves such a product
    beside: tuple[str, ...] | None = None
    #: whether its rate is also taken back to back, at the power limit
    back_to_back: bool = False

    def __post_init__(self) -> None:
        if any(self.n % side for side in self.block):
            raise ValueError(f"a size of {self.n} is not a multiple of the block {self.block[0]} x {self.block[1]}")

    def __str__(self) -> str:
        R, C = self.block
        near = self.near_diagonal
        where = f"{self.each} blocks a row" if near else f"density {self.each / self._grid[1]:.2f}"
        columns = "a vector" if self.columns == 1 else f"{self.columns} columns"
        parts = [f"{self.kind} {R} x {C}", f"n = {self.n:,}", where, columns]
        parts += [self.pattern] if self.pattern not in ("uniform", "near diagonal") else []
        parts += [{"batch": f"B in a batch of {_BATCH}"}.get(self.form, self.form)] if self.form != "A @ B" else []
        return ", ".join([*parts, *([f"on {self.kernel}"] if self.kernel else [])])

    @property
    def near_diagonal(self) -> bool:
        """Whether the matrix has a few small blocks in each row: no dense product is a peer."""
        return "diagonal" in self.pattern and self.pattern != "block-diagonal"

    @property
    def _grid(self) -> tuple[int, int]:
        """Block rows and block columns."""
        return self.n // self.block[0], self.n // self.block[1]

    @property
    def each(self) -> int:
        """Blocks of a block row, on average."""
        return min(self._grid[1], max(1, round(self.density * self._grid[1])))

    @property
    def _pattern(self) -> Pattern:
        return _pattern(self.pattern, *self._grid, self.each)

    @property
    def stored(self) -> int:
        """Stored elements."""
        count = self._grid[0] * self.each
        if self.pattern in ("arrowhead", "bernoulli", "block-diagonal"):
            count = len(self._pattern[0])
        return count * self.block[0] * self.block[1]

    @property
    def flops(self) -> float:
        return 2.0 * self.stored * self.columns

    @property
    def _result(self) -> np.dtype[Any]:
        return np.dtype(np.float16) if self.kind == "e4m3" else stored_dtype(self.kind)

    @property
    def moved(self) -> float:
        size = stored_dtype(self.kind).itemsize
        lists = 4.0 * (self.stored / (self.block[0] * self.block[1]) + self._grid[0] + 1)
        return self.stored * size + lists + self.n * self.columns * (size + self._result.itemsize)

    @property
    def memory(self) -> float:
        # C again for each peer, A dense and as Blocked-ELL, pieces in float64
        dense = 0.0 if self.near_diagonal else float(self.n) ** 2 * stored_dtype(self.kind).itemsize
        result = float(self.n) * self.columns * self._result.itemsize
        pieces = 16 * min(1 << 25, max(self.stored, self.n * self.columns))
        return 2 * self.moved + 3 * result + (dense if dense <= _DENSE_MOST else 0) + pieces

    def matrix(self, place: Place, pattern: Pattern | None = None) -> Any:
        """A, with random blocks."""
        xp, (columns, starts) = place.xp, pattern or self._pattern
        lists = (xp.asarray(x.astype(np.int32)) for x in (columns, starts))
        return bsr_array((place.draw((len(columns), *self.block), self.kind), *lists), shape=(self.n, self.n))

    def right(self, place: Place) -> Any:
        """B."""
        if self.columns == 1:
            return place.draw((self.n,), self.kind)
        if self.kind == "e4m3":  # the tensor cores need it column-major
            return place.draw((self.columns, self.n), self.kind).T
        if self.form == "B @ A":
            return place.draw((self.columns, self.n), self.kind)
        if self.form == "batch":
            return place.draw((_BATCH, self.n, self.columns // _BATCH), self.kind)
        return place.draw((self.n, self.columns), self.kind)

    def call(self, A: Any, B: Any, xp: Any) -> Call:
        """Our product."""
        if self.kind == "e4m3":
            return lambda: matmul(A, B, scale_a=1.0, scale_b=1.0, out_dtype=np.float16)
        out = xp.empty_like(B)
        options = {"precision": "tf32"} if self.kind == "tf32" else {}
        left = A.T if self.form == "A.T @ B" else A
        operands = (B, A) if self.form == "B @ A" else (left, B)

        return forced(partial(matmul, *operands, out=out, **options), self.kernel)

    def error(self, A: Any, B: Any, C: Any) -> float:
        """How far all rows of C are off, over what is allowed."""
        if self.form == "batch":
            off = max(product_error(A, B[k], C[k]) for k in range(_BATCH))
        elif self.form == "B @ A":
            off = product_error(A, B.T, C.T, transposed=True)
        else:
            off = product_error(A, B, C, transposed=self.form == "A.T @ B")
        return off / TOLERANCE[self.kind].product

    def ready(self, place: Place) -> Ready:
        A, B = self.matrix(place), self.right(place)
        found = self._peers(place, A, B)
        return Ready(
            self.call(A, B, place.xp), partial(self.error, A, B),
            {name: make for name, make in found.items() if self.beside is None or name in self.beside},
        )  # fmt: skip

    def _peers(self, place: Place, A: Any, B: Any) -> dict[str, Callable[[], Peer]]:
        if self.beside is not None and {"even rows", "A @ B"} & set(self.beside):
            return self._own(place, A, B)
        if self.form != "A @ B":
            return {}
        return self._on_gpu(place, A, B) if place.on_gpu else self._on_host(place, A, B)

    def _own(self, place: Place, A: Any, B: Any) -> dict[str, Callable[[], Peer]]:
        """The same matrix in A @ B, and one with as many blocks in rows of equal lengths."""
        plain = Product(self.n, self.block, self.density, self.columns, self.kind)
        X = plain.right(place) if self.form in ("B @ A", "batch") else B
        lengths = even_lengths(self._grid[0], len(A.indices))
        make = near_diagonal if self.near_diagonal else from_lengths

        def even() -> Peer:
            E = self.matrix(place, make(lengths, self._grid[1]))
            return Peer(plain.call(E, X, place.xp), judged=False)

        return {"even rows": even, "A @ B": ours_too(plain.call(A, X, place.xp))}

    def _on_gpu(self, place: Place, A: Any, B: Any) -> dict[str, Callable[[], Peer]]:
        def sparse(maker: Callable[[Any, Any, Any], Call]) -> Callable[[], Peer]:
            return lambda: Peer(maker(A, B, place.xp.empty_like(B)))

        found = {"cuSPARSE BSR": sparse(peers.cusparse_bsr_vector if self.columns == 1 else peers.cusparse_bsr)}
        if self.columns == 1 and self.near_diagonal:
            found["warp"] = sparse(peers.warp_bsr)
        if not self.near_diagonal:
            dense = _Dense(self, place, B)
            found = {dense.name: dense.cublas} | found
            if self.columns > 1:
                found |= {"Blocked-ELL": sparse(peers.cusparse_ell), "torch BSR": sparse(peers.torch_bsr)}
        if self.stored <= _CSR_MOST and self.kind in ("float32", "float64"):
            found["cupyx csr"] = lambda: Peer(partial(operator.matmul, as_csr(A), B))
        return found

    def _on_host(self, place: Place, A: Any, B: Any) -> dict[str, Callable[[], Peer]]:
        half = A.dtype.itemsize == 2  # neither SciPy nor BLAS supports these dtypes
        a, b = (A.astype(np.float32), B.astype(np.float32)) if half else (A, B)
        found = {
            "scipy bsr": plainly(lambda: partial(operator.matmul, as_scipy(a), b)),
            "scipy csr": plainly(lambda: partial(operator.matmul, as_scipy(a).tocsr(), b)),
        }
        if not self.near_diagonal:
            found["dense BLAS"] = plainly(lambda: partial(operator.matmul, a.toarray(), b))
        elif self.columns == 1:
            found["warp"] = plainly(lambda: peers.warp_bsr(A, B, np.empty_like(B)))
        return found


class _Dense:
    """A dense matrix of random numbers, for BLAS: zeros draw less power and would flatter it. fp8 is float16 there."""

    def __init__(self, product: Product, place: Place, B: Any) -> None:
        self._place, self._n, self._tf32 = place, product.n, product.kind == "tf32"
        self._kind = "float16" if product.kind == "e4m3" else product.kind
        self._given, self._columns = B, product.columns
        self.name = "cuBLAS float16" if product.kind == "e4m3" else "cuBLAS"

    @cached_property
    def _operands(self) -> tuple[Any, Any]:
        if self._n**2 * stored_dtype(self._kind).itemsize > _DENSE_MOST:
            raise NotImplementedError(f"a dense A would take more than {_DENSE_MOST >> 30} GiB")
        B = self._given.reshape(self._n, -1)
        if B.dtype == np.uint8:
            B = self._place.draw((self._n, self._columns), self._kind)
        return self._place.draw((self._n, self._n), self._kind), B

    def _error(self, C: Any) -> float:
        return dense_error(*self._operands, C) / TOLERANCE["tf32" if self._tf32 else self._kind].product

    def cublas(self) -> Peer:
        A, B = self._operands
        return Peer(peers.dense(A, B, self._place.xp.empty((self._n, B.shape[1]), A.dtype), self._tf32), self._error)
