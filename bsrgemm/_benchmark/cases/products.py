"""C = A B for a block-sparse A: `gemm` for many columns, `spmv` for one or a few on small blocks."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import scipy.sparse

from bsrgemm import bsr_array, matmul

from ..checks.products import EXACT_CHUNK, dense_deviation, vector_deviation
from ..patterns import Pattern, banded, uniform
from ..peers import products as peers
from ..place import Draw, Place
from ..random_data import stored_dtype
from ..timing import Call
from .problem import Peer, Ready

#: Largest |C x - A (B x)| for a vector x of signs, over the norms of A's row and of x (B is standard normal), by what
#: the product is computed in: a few times what rounding explains. An element that is not there gives 1 / sqrt(columns).
_TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "e4m3": 2e-2, "float32": 1e-5, "tf32": 6e-3, "float64": 1e-13}
#: The largest size in bytes of a dense A for which peers are measured.
_DENSE_MOST = 8 << 30
#: The largest number of elements for which A is also built as CSR, which stores every element with its column.
_CSR_MOST = 1 << 28


@dataclass(frozen=True)
class Product:
    """An n x n matrix of R x C blocks by n x columns; a band of blocks in `spmv`, random blocks in `gemm`."""

    group: str
    n: int
    block: tuple[int, int]
    density: float
    columns: int
    dtype: str = "float16"
    #: "tf32" for float32
    precision: str | None = None

    def __str__(self) -> str:
        R, C = self.block
        where = f"{self.each} blocks a row" if self.group == "spmv" else f"density {self.each / self._grid[1]:.2f}"
        columns = "a vector" if self.columns == 1 else f"{self.columns} columns"
        return f"{self.computed_in} {R} x {C}, n = {self.n:,}, {where}, {columns}"

    def parameters(self) -> dict[str, Any]:
        return {
            "n": self.n, "block": list(self.block), "density": self.each / self._grid[1], "asked_density": self.density,
            "columns": self.columns,
            "dtype": self.computed_in,
        }  # fmt: skip

    @property
    def computed_in(self) -> str:
        return self.precision or self.dtype

    @property
    def _grid(self) -> tuple[int, int]:
        """Block rows and block columns."""
        return self.n // self.block[0], self.n // self.block[1]

    @property
    def each(self) -> int:
        """Blocks of a block row."""
        return min(self._grid[1], max(1, round(self.density * self._grid[1])))

    @property
    def _stored(self) -> int:
        """Stored elements."""
        return self._grid[0] * self.each * self.block[0] * self.block[1]

    @property
    def flops(self) -> float:
        return 2.0 * self._stored * self.columns

    @property
    def _result(self) -> np.dtype[Any]:
        return np.dtype(np.float16) if self.dtype == "e4m3" else stored_dtype(self.dtype)

    @property
    def traffic(self) -> float:
        size = stored_dtype(self.dtype).itemsize
        rows, columns = self._grid
        dense = columns * self.block[1] * size + rows * self.block[0] * self._result.itemsize
        return self._stored * size + 4.0 * (rows * self.each + rows + 1) + dense * self.columns

    @property
    def memory(self) -> float:
        # C again for each peer, A dense and as Blocked-ELL, pieces in float64
        size = stored_dtype(self.dtype).itemsize
        dense = float(self.n) ** 2 * size if self.group == "gemm" else 0.0
        result = float(self.n) * self.columns * self._result.itemsize
        pieces = 16 * min(EXACT_CHUNK, max(self._stored, self.n * self.columns))
        return 2 * self.traffic + 3 * result + (dense if dense <= _DENSE_MOST else 0) + pieces

    def pattern(self) -> Pattern:
        return (banded if self.group == "spmv" else uniform)(*self._grid, self.each)

    def ready(self, place: Place, draw: Draw) -> Ready:
        xp, pattern = place.xp, self.pattern()
        data = draw((pattern.blocks, *self.block), self.dtype)
        lists = (xp.asarray(x.astype(np.int32)) for x in (pattern.indices, pattern.indptr))
        A = bsr_array((data, *lists), shape=(self._grid[0] * self.block[0], self._grid[1] * self.block[1]))
        B = self._right(A.shape[1], draw)
        out = xp.empty((A.shape[0], *B.shape[1:]), self._result)
        return Ready(self._ours(A, B, out), partial(self._error, A, B), self._peers(place, draw, A, B, out))

    def _right(self, rows: int, draw: Draw) -> Any:
        if self.columns == 1:
            return draw((rows,), self.dtype)
        if self.dtype == "e4m3":  # the tensor cores need it column-major
            return draw((self.columns, rows), self.dtype).T
        return draw((rows, self.columns), self.dtype)

    def _ours(self, A: Any, B: Any, out: Any) -> Call:
        if self.dtype == "e4m3":
            return lambda: matmul(A, B, scale_a=1.0, scale_b=1.0, out_dtype=np.float16)
        options = {} if self.precision is None else {"precision": self.precision}
        return lambda: matmul(A, B, out=out, **options)

    def _error(self, A: Any, B: Any, C: Any) -> float:
        """How far all rows of C are off, over what is allowed."""
        return vector_deviation(A, B, C) / _TOLERANCE[self.computed_in]

    # ---------------------------------------------------------------------------------- peers
    def _peers(self, place: Place, draw: Draw, A: Any, B: Any, out: Any) -> dict[str, Callable[[], Peer]]:
        if place.name == "cpu":
            return self._host_peers(A, B)

        def sparse(maker: Callable[[Any, Any, Any], Call]) -> Callable[[], Peer]:
            return lambda: Peer(maker(A, B, place.xp.empty_like(out)))

        found: dict[str, Callable[[], Peer]] = {}
        if self.group == "gemm":
            dense = _Dense(self, place, draw, A, B)
            found |= {"cuBLAS": dense.cublas, "nvmath": dense.nvmath}
        if self.columns == 1:
            found |= {"cuSPARSE BSR": sparse(peers.cusparse_bsr_vector), "warp": sparse(peers.warp_bsr)}
        else:
            found["cuSPARSE BSR"] = sparse(peers.cusparse_bsr)
            if self.group == "gemm":
                found |= {"Blocked-ELL": sparse(peers.cusparse_ell), "torch BSR": sparse(peers.torch_bsr)}
        if self._stored <= _CSR_MOST and self.computed_in in ("float32", "float64"):
            found["cupyx csr"] = lambda: Peer(partial(operator.matmul, A.tocsr(), B))
        return found

    def _host_peers(self, A: Any, B: Any) -> dict[str, Callable[[], Peer]]:
        half = A.dtype.itemsize == 2  # neither SciPy nor BLAS supports these dtypes
        a, b = (A.astype(np.float32), B.astype(np.float32)) if half else (A, B)
        S = scipy.sparse.bsr_array((a.data, A.indices, A.indptr), shape=A.shape)
        found: dict[str, Callable[[], Peer]] = {
            "scipy bsr": lambda: Peer(partial(operator.matmul, S, b)),
            "scipy csr": lambda: Peer(partial(operator.matmul, S.tocsr(), b)),
        }
        if self.group == "gemm":
            found["dense BLAS"] = lambda: Peer(partial(operator.matmul, a.toarray(), b))
        elif self.columns == 1:
            found["warp"] = lambda: Peer(peers.warp_bsr(A, B, np.empty_like(B)))
        return found


class _Dense:
    """A dense matrix of random numbers, for BLAS: zeros draw less power and would flatter it."""

    def __init__(self, product: Product, place: Place, draw: Draw, A: Any, B: Any) -> None:
        self._product, self._place, self._draw, self._shape = product, place, draw, A.shape
        self._B = B.reshape(B.shape[0], -1)

    @cached_property
    def _full(self) -> Any:
        product = self._product
        if product.dtype == "e4m3":
            raise NotImplementedError("this peer does not support e4m3")
        if self._shape[0] * self._shape[1] * self._B.dtype.itemsize > _DENSE_MOST:
            raise NotImplementedError(f"a dense A would take more than {_DENSE_MOST >> 30} GiB")
        return self._draw(self._shape, product.dtype)

    def _error(self, C: Any) -> float:
        return dense_deviation(self._full, self._B, C) / _TOLERANCE[self._product.computed_in]

    def cublas(self) -> Peer:
        out = self._place.xp.empty((self._shape[0], self._B.shape[1]), self._full.dtype)
        tf32 = self._product.precision == "tf32"
        return Peer(self._place.dense_product(self._full, self._B, out, tf32), self._error)

    def nvmath(self) -> Peer:
        if self._product.precision is not None:
            raise NotImplementedError("this peer is not measured in tf32")
        return Peer(peers.nvmath_dense(self._full, self._B), self._error)
