"""Results that are sparse: A A (`Square`), and X Y on the blocks of a pattern (`Sampled`)."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import bsrgemm as bg

from ..checks import TOLERANCE, block_rows, dense_error, exact, signs, square_error
from ..data import as_csr, as_scipy, mesh, stored_dtype, widen
from ..peers import products as peers
from ..place import Place
from .case import Peer, Ready
from .products import Product

_DENSITY = 0.22


@dataclass(frozen=True)
class Square:
    """A A: random blocks, or 3 x 3 blocks of a mesh of cells x cells x cells hexahedra; the whole call, or planned."""

    n: int = 0
    block: int = 3
    cells: int = 0
    #: whether it is known which blocks meet, by `bsrgemm.plan`
    planned: bool = False

    def __str__(self) -> str:
        if self.cells:
            return f"{self.kind} 3 x 3, {self.cells}^3 hexahedra, {3 * (self.cells + 1) ** 3:,} rows"
        what = "planned" if self.planned else "A @ A"
        return f"{self.kind} {self.block} x {self.block}, n = {self.n:,}, density {_DENSITY}, {what}"

    @property
    def kind(self) -> str:
        return "float64" if self.cells else "float16"

    @property
    def _product(self) -> Product:
        side, b = 3 * (self.cells + 1) ** 3 if self.cells else self.n, self.block
        return Product(side, (b, b), 27 * b / side if self.cells else _DENSITY, side, self.kind)

    @property
    def flops(self) -> float:
        """Of all pairs of blocks that meet."""
        product = self._product
        if self.cells:
            columns, starts = mesh(self.cells)
            return 2.0 * int(np.diff(starts)[columns].sum()) * self.block**3
        return 2.0 * product.stored * product.each * self.block

    @property
    def moved(self) -> float:
        product = self._product
        result = (125 if self.cells else product.n // self.block) * product.n * self.block
        return stored_dtype(self.kind).itemsize * (product.stored + float(result))

    @property
    def memory(self) -> float:
        return 4 * self.moved

    def ready(self, place: Place) -> Ready:
        A = self._product.matrix(place, mesh(self.cells) if self.cells else None)
        allowed = TOLERANCE[self.kind].product
        plan = bg.plan(A, A) if self.planned else None
        call = partial(operator.matmul, A, A) if plan is None else partial(plan, A, A)
        found: dict[str, Any] = {}
        if self.cells:

            def squared(S: Any) -> Peer:
                return Peer(partial(operator.matmul, S, S))

            def warp() -> Peer:
                theirs = peers.warp_bsr_bsr(A, A)
                return Peer(theirs, lambda C: square_error(A, peers.from_warp(C)) / allowed)

            found = {"cupyx csr": lambda: squared(as_csr(A)), "warp": warp}
            if not place.on_gpu:
                found = {"scipy bsr": lambda: squared(as_scipy(A)), "scipy csr": lambda: squared(as_csr(as_scipy(A)))}
        else:
            found = {"cuBLAS" if place.on_gpu else "dense BLAS": partial(self._dense, place)}
        return Ready(call, lambda C: square_error(A, C) / allowed, found)

    def _dense(self, place: Place) -> Peer:
        """The square of a dense matrix of random numbers; BLAS on the host has no float16."""
        kind = "float16" if place.on_gpu else "float32"
        full = place.draw((self.n, self.n), kind)
        call = peers.dense(full, full, place.xp.empty_like(full))
        return Peer(call, lambda C: dense_error(full, full, C) / TOLERANCE[kind].product)


@dataclass(frozen=True)
class Sampled:
    """X Y of n x n on the blocks of a uniform pattern, Y row-major or column-major."""

    n: int
    block: int
    kind: str = "float16"
    layout: str = "row"

    def __str__(self) -> str:
        return f"{self.kind} {self.block} x {self.block}, n = {self.n:,}, density {_DENSITY}, Y {self.layout}-major"

    @property
    def _product(self) -> Product:
        return Product(self.n, (self.block, self.block), _DENSITY, self.n, self.kind)

    @property
    def flops(self) -> float:
        return 2.0 * self._product.stored * self.n

    @property
    def moved(self) -> float:
        return stored_dtype(self.kind).itemsize * (self._product.stored + 2.0 * self.n**2)

    @property
    def memory(self) -> float:
        return 3 * self.moved + 8 * 5.0 * self.n**2

    def ready(self, place: Place) -> Ready:
        xp, n = place.xp, self.n
        X, Y = place.draw((n, n), self.kind), place.draw((n, n), self.kind)
        right = xp.asfortranarray(Y) if self.layout == "column" else Y
        pattern = self._product.matrix(place)
        pattern.sum_duplicates()  # there are no duplicates; this call stores that
        call = partial(bg.sddmm, X, right, pattern, precision="tf32" if self.kind == "tf32" else None)
        allowed, s = TOLERANCE[self.kind].product, signs(n, xp)
        terms = n * self._product.each * self.block

        def blocks_error(blocks: Any) -> float:
            """The blocks times signs, beside those of the exact product, over the root of the number of terms."""
            b = self.block
            rows, columns = block_rows(pattern), pattern.indices
            worst = 0.0
            step = max(1, (1 << 24) // (b * n))
            for start in range(0, n // b, step):  # some block rows of X Y at a time, in float64
                want = widen(X[start * b : (start + step) * b]) @ widen(Y)
                own = (rows >= start) & (rows < start + step)
                tiles = want.reshape(-1, b, n // b, b).transpose(0, 2, 1, 3)[rows[own] - start, columns[own]]
                off = bg.bsr_array(
                    (widen(blocks[own]) - tiles, (rows[own] - start, columns[own])), shape=(len(want), n)
                )
                worst = max(worst, float(xp.abs(exact(off, s)).max()))
            return worst / terms**0.5 / allowed

        def dense() -> Peer:
            if place.on_gpu:
                theirs = peers.dense(X, Y, xp.empty_like(X), self.kind == "tf32")
            else:  # BLAS on the host has no float16
                theirs = partial(np.matmul, *(x.astype(np.float32) if self.kind == "float16" else x for x in (X, Y)))
            return Peer(theirs, lambda C: dense_error(X, Y, C) / allowed)

        name = "cuBLAS" if place.on_gpu else "dense BLAS"
        return Ready(call, lambda got: blocks_error(got.data), {name: dense})
