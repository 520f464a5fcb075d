"""Kernels that copy an operand so that another kernel can read it: a preparation is a kernel that holds a kernel.

Each starts a `Chain`: copies, and the launches that read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import cupy
import numpy as np

from .._backend.base import Array, Backend
from .._kernels import forced_kernel
from .._kernels.card import Card, tensor_arch
from .._kernels.element_types import BYTES, Types
from .._kernels.jit import MAX_GRID_X, MAX_GRID_YZ
from .._kernels.kernel import Kernel
from .._kernels.launch import Chain, Launch
from . import arguments, tuned
from .call import Lie, Problem, order_of
from .choice import by_rows, by_rule, variants
from .dense import Dense
from .gemm_simt import GemmFew
from .gemm_sm80 import GemmSm80
from .gemm_sm90 import GemmSm90
from .operand import Kind, Operand, operand_of

#: A copy of B with aligned rows pays if the number of elements of A times the number of columns of B is at least this.
_WORTH_A_COPY = 1 << 22
#: A copy by columns pays, by its number of parts, if that product is at least the first number, and if a column of A
#: has at least so many stored elements, in blocks of 16, 32 and 64 n rows. Each element of the copy is used as often.
_WORTH_COLUMNS = {1: (1 << 32, 192, 512, 512), 2: (1 << 29, 128, 448, 256)}
#: It pays for no fewer columns: tiles of gemm_sm90 would be empty in part.
_LEAST_COLUMNS = 96
#: A copy by columns has at most so many bytes; the product is computed in panels if B has more.
_PANEL_BYTES = 256 << 20
#: The number of columns of a panel is a multiple of this.
_PANEL_COLUMNS = 256
#: With fewer columns than this, copying complex A and B costs more than the tensor cores save.
_LEAST_COMPLEX_COLUMNS = 64
_REAL: dict[str, tuple[str, np.dtype[Any]]] = {
    "c64": ("f32", np.dtype(np.float32)),
    "c128": ("f64", np.dtype(np.float64)),
}


@dataclass(frozen=True)
class ColumnsTf32(Kernel, source="columns_tf32.cu", argument=arguments.COLUMNS_TF32):
    """A column-major copy of B, rounded to tf32 or in two parts of tf32, for GemmSm90; 64 x 64 elements at a time."""

    parts: int

    threads, side = 256, 64

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[ColumnsTf32]:
        yield from map(cls, (1, 2))

    def grid(self, rows: int, columns: int, batches: int) -> tuple[int, int, int]:
        """Tiles of columns, tiles of rows, batches. The kernel loops over whatever exceeds it."""
        tiles_y = min(MAX_GRID_YZ, -(-rows // self.side))
        return min(MAX_GRID_X, -(-columns // self.side)), tiles_y, min(MAX_GRID_YZ, batches)

    def launch(self, B: Any) -> Launch:
        """The launch for a B that lies like this; its operands are B and the copy."""
        batches, steps = (B.shape[0] if B.ndim == 3 else 1), [n // B.itemsize for n in B.strides]
        rows, columns = B.shape[-2:]
        packed = arguments.COLUMNS_TF32.pack(
            **{"from": 0}, to=0, batch=steps[0] if B.ndim == 3 else 0, row=steps[-2], column=steps[-1], rows=rows,
            columns=columns, batches=batches,
        )  # fmt: skip
        write = arguments.COLUMNS_TF32.patch("from", "to").write
        return Launch(self, self.grid(rows, columns, batches), packed, pointers=write)


class Preparation(Dense):
    """A kernel that prepares an operand for another one. It is not compiled itself, and no variant of it is tried."""

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[Any]:
        yield from ()


@dataclass(frozen=True)
class ByColumns(Preparation):
    """Copy B by columns in float32, rounded to tf32 or in two parts of tf32, a panel of columns at a time."""

    copy: ColumnsTf32
    #: columns of a panel
    width: int

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        return column_panel(problem) > 0

    @classmethod
    def best(cls, problem: Problem) -> ByColumns:
        return cls(ColumnsTf32(column_parts(problem.tf32)), column_panel(problem))

    def inner(self, problem: Problem) -> Dense:
        """The kernel that multiplies."""
        return choose(self.copied(problem), copies=False)

    def copied(self, problem: Problem) -> Problem:
        """The product with the copy of B."""
        return replace(problem, b_order="F", parts=self.copy.parts)

    def seconds(self, problem: Problem, card: Card) -> float:
        """The copy reads B and writes its parts."""
        copied = problem.N * problem.batches * problem.block_cols * problem.K * BYTES["f32"] * (1 + self.copy.parts)
        return self.inner(problem).seconds(problem, card) + 3e-6 + copied / (0.8 * card.bandwidth)

    def prepare(self, call: Kind, card: Card) -> Chain:
        problem, B, out, parts = call.problem, call.B, call.out, self.copy.parts
        *outer, rows, _ = B.shape
        size, steps = B.itemsize, []
        for first in range(0, problem.N, self.width):
            n = min(self.width, problem.N - first)
            some, to = _columns(B, first, n), _columns(out, first, n)
            batch = (parts * rows * n * size,) * len(outer)  # matrices of a batch have their parts side by side
            panel = Lie(B.dtype, (*outer, rows, n), (*batch, size, rows * size))
            kind = replace(problem, N=n, b_order="F", c_order=order_of(to), parts=parts)
            inner = choose(kind, copies=False).prepare(Kind(kind, call.operand, panel, to), card)
            steps.append(_OnePanel(self.copy.launch(some), inner, first, n, parts))
        count = int(np.prod(outer)) * parts * rows * min(self.width, problem.N)
        return Chain(
            steps,
            [((count,), B.dtype)],
            # Without memory for the copy, the product takes B itself, and the next call tries again.
            otherwise=lambda: choose(problem, copies=False).prepare(call, card),
        )


@dataclass(frozen=True)
class _OnePanel:
    """The step that copies some columns of B and multiplies them."""

    copy: Launch
    inner: Any
    first: int
    count: int
    parts: int

    def __call__(self, arrays: Any, *numbers: Any) -> None:
        B, out, room = arrays
        B, out = _columns(B, self.first, self.count), _columns(out, self.first, self.count)
        copied = room[: self.parts * B.size].reshape(*B.shape[:-2], self.parts, self.count, B.shape[-2])
        self.copy.start((B, room))
        self.inner.start((copied[..., 0, :, :].swapaxes(-1, -2), out), *numbers)


@dataclass(frozen=True)
class AlignedRows(Preparation):
    """Copy B with rows that start at multiples of 16 bytes, since the tensor cores cannot read B itself."""

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        few = forced_kernel.name in (None, "GemmFew") and GemmFew.serves(replace(problem, c_order="", overwrite=True))
        return not few and wants_aligned_rows(replace(problem, c_order="", overwrite=True))

    @classmethod
    def best(cls, problem: Problem) -> AlignedRows:
        return cls()

    def prepare(self, call: Kind, card: Card) -> Chain:
        *outer, N = call.B.shape
        unit = 16 // call.B.itemsize
        room = Lie.in_order(call.B.dtype, (*outer, -(-N // unit) * unit))
        problem = replace(call.problem, b_order="C")
        copied = Kind(problem, call.operand, room._replace(shape=tuple(call.B.shape)), call.out)
        inner = choose(problem, copies=False).prepare(copied, card)

        def copy_and_multiply(arrays: Any, *numbers: Any) -> None:
            copy = arrays[2][..., :N]
            copy[...] = arrays[0]
            inner.start((copy, arrays[1]), *numbers)

        return Chain([copy_and_multiply], [(room.shape, room.dtype)])


@dataclass(frozen=True)
class ColumnsFp8(Preparation):
    """Copy B by columns in fp8, which the tensor cores read along K alone."""

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        return problem.arch == "sm_90a" and problem.types.a == "e4m3" and problem.b_order != "F" and problem.N > 1

    @classmethod
    def best(cls, problem: Problem) -> ColumnsFp8:
        return cls()

    def prepare(self, call: Kind, card: Card) -> Chain:
        *outer, rows, N = call.B.shape
        size = call.B.itemsize
        batch = (rows * N * size,) * len(outer)
        columns = Lie(call.B.dtype, (*outer, rows, N), (*batch, size, rows * size))
        problem = replace(call.problem, b_order=order_of(columns))
        inner = choose(problem, copies=False).prepare(Kind(problem, call.operand, columns, call.out), card)

        def copy_and_multiply(arrays: Any, *numbers: Any) -> None:
            copy = arrays[2].swapaxes(-1, -2)
            copy[...] = arrays[0]
            inner.start((copy, arrays[1]), *numbers)

        return Chain([copy_and_multiply], [((*outer, N, rows), call.B.dtype)])


@dataclass(slots=True)
class _RealMatrix:
    """The real matrix [Re A, Im A] of a complex matrix A, with only those attributes that a product reads."""

    data: Array
    indices: Array
    indptr: Array
    _shape: tuple[int, int]
    _backend: Backend
    _memo: Operand | None = None


@dataclass(frozen=True)
class RealViews(Preparation):
    """Complex products on the tensor cores, which can only multiply real numbers.

    If each complex column of B is stored as two real columns, ``A @ B = [Re A, Im A] @ [B; iB]`` is a product of real
    matrices. Its blocks are twice as wide and its right-hand side is twice as high. Each complex multiplication becomes
    four real ones, which is as many as it needs. The real A is copied in every call, since the values of A may have
    changed; its memory and its lists are kept with A.
    """

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        names = problem.types
        return (
            names.a in _REAL
            and names.of_one(names.a)
            and problem.batches == 1
            and problem.R % 16 == 0
            and problem.K % 8 == 0
            and problem.N >= _LEAST_COMPLEX_COLUMNS
            and 0 < 2 * problem.blocks * problem.R * problem.K < 2**31
            and tensor_arch(problem.arch)
        )

    @classmethod
    def best(cls, problem: Problem) -> RealViews:
        return cls()

    def prepare(self, call: Kind, card: Card) -> Chain:
        problem, out = call.problem, call.out
        name, real = _REAL[problem.types.a]
        K, N, rows = problem.K, problem.N, problem.block_cols * problem.K
        A, axis = call.operand, 1 if problem.transposed else 2
        wide = self._real_matrix(A, real, axis)
        operand = operand_of(wide)
        kind = replace(
            problem, types=Types(name, name, name, name, problem.types.index), K=2 * K, N=2 * N, b_order="C",
            c_order="C", overwrite=True, aligned=operand.pointer % 16 == 0,
        )  # fmt: skip
        lies = (Lie.in_order(real, (2 * rows, 2 * N)), Lie.in_order(real, (problem.block_rows * problem.R, 2 * N)))
        inner = choose(kind).prepare(Kind(kind, operand, *lies), card)
        data, overwrite = A.source[0], problem.overwrite
        direct = overwrite and out.flags.c_contiguous and out.data.ptr % 16 == 0

        def multiply(arrays: Any, alpha: Any, beta: Any) -> None:
            B, out, panels = arrays
            left, right = cupy.split(wide.data, 2, axis=axis)
            left[...], right[...] = data.real, data.imag
            parts = B.reshape(rows // K, K, N)
            panels[:, 0, :, :, 0] = panels[:, 1, :, :, 1] = parts.real  # B and iB for each block column of A
            panels[:, 0, :, :, 1] = parts.imag
            cupy.negative(parts.imag, out=panels[:, 1, :, :, 0])
            straight = direct and isinstance(alpha, int | float)
            result = out.reshape(-1, N) if straight else cupy.empty((problem.block_rows * problem.R, N), out.dtype)
            inner.start((panels.reshape(2 * rows, 2 * N), result.view(real)), alpha if straight else 1, 0)
            if not straight:
                result *= alpha
                result = result.reshape(out.shape)
                out[...] = result if overwrite else result + beta * out

        return Chain([multiply], [((rows // K, 2, K, N, 2), real)])

    @staticmethod
    def _real_matrix(A: Operand, real: np.dtype[Any], axis: int) -> _RealMatrix:
        """Return the real matrix whose blocks are [Re, Im] of the blocks of A, without its values."""
        found: _RealMatrix | None = A.wide.get(axis)
        if found is None:
            data, indices, indptr = A.source
            sides, shape = list(data.shape), list(A.shape)
            sides[axis] *= 2
            shape[axis - 1] *= 2
            found = _RealMatrix(cupy.empty(sides, real), indices, indptr, (shape[0], shape[1]), A.backend)
            A.wide[axis] = found
        return found


def compiled_for(problem: Problem) -> tuple[Kernel, ...]:
    """Return the kernels that the rules start for a product: the one that multiplies, and the one that copies B."""
    if ByColumns.serves(problem):
        found = ByColumns.best(problem)
        return found.copy, by_rule(found.copied(problem))
    return (by_rule(problem),)


def choose(problem: Problem, copies: bool = True) -> Dense:
    """Return the kernel for a product: the forced one, the one that `tune` has stored, or the one of the rule.

    With `copies` it may be a preparation, which copies an operand for another kernel.
    """
    forced = forced_kernel.name
    if copies:
        for preparation in (RealViews, ColumnsFp8):
            if preparation.serves(problem):
                return preparation.best(problem)
    stored = None if forced is not None else tuned.stored(problem)
    if copies and problem.types.a != "e4m3":
        if forced is None and stored is None and ByColumns.serves(problem):
            return ByColumns.best(problem)
        if not problem.b_order and AlignedRows.serves(problem):
            return AlignedRows.best(problem)
    if forced is None:
        return by_rule(problem) if stored is None else stored
    for kernel in variants(problem):
        if type(kernel).__name__ == forced:
            return kernel
    raise ValueError(f"{forced} cannot multiply this: {problem}")


def _columns(x: Any, first: int, count: int) -> Any:
    """Some columns of an operand."""
    return x if first == 0 and count == x.shape[-1] else x[..., first : first + count]


@lru_cache(maxsize=1024)
def wants_aligned_rows(problem: Problem) -> bool:
    """Return whether a copy of B, with rows that start at multiples of 16 bytes, makes this product faster.

    That is so if the tensor cores can compute the product only with such a B, and if the product is large enough.

    >>> import numpy as np
    >>> from bsrgemm._kernels.element_types import types
    >>> names = types(*[np.dtype("float16")] * 3, np.dtype("float32"), np.dtype("int32"))
    >>> sizes = {"R": 64, "K": 64, "batches": 1, "block_rows": 128, "block_cols": 128, "blocks": 3584}
    >>> layout = {"transposed": False, "b_order": "", "c_order": "", "overwrite": True, "aligned": True}
    >>> odd = Problem("sm_90a", names, N=101, **sizes, **layout)
    >>> [wants_aligned_rows(replace(odd, **x)) for x in ({}, {"b_order": "C"}, {"blocks": 9})]
    [True, False, False]
    """
    work = problem.blocks * problem.R * problem.K * problem.N * problem.batches
    if problem.b_order or problem.N == 1 or work < _WORTH_A_COPY:
        return False
    aligned = replace(problem, b_order="C")
    return GemmSm90.serves(aligned) or GemmSm80.serves(aligned)


def column_parts(tf32: bool) -> int:
    """Return the number of parts of a copy by columns: tf32 takes one, float32 two."""
    return 1 if tf32 else 2


@lru_cache(maxsize=1024)
def column_panel(problem: Problem) -> int:
    """Return how many columns of B are copied at a time, column by column, or 0 if the product is faster with B itself.

    Hopper's tensor cores read tf32 along K only, and float32 in two parts of tf32; with any other B, gemm_sm80 computes
    the product. TFLOP/s on an H200, n = 8192, density 0.22, by gemm_sm80 / by gemm_sm90 with the time of the copy:

    ========  =========  =========  =========
    16        32         64         128
    ========  =========  =========  =========
    40 / 106  103 / 156  126 / 224  162 / 255
    ========  =========  =========  =========

    At density 0.05 (410 elements in a column of A), they are 36 / 55, 84 / 81, 101 / 111 and 124 / 119. In float32:

    =======  =======  =======  =======  ========
    density  16       32       64       128
    =======  =======  =======  =======  ========
    0.22     19 / 40  45 / 60  50 / 86  51 / 101
    0.05     17 / 26  41 / 41  46 / 55  46 / 61
    0.035    16 / 23  40 / 36  45 / 46  44 / 49
    =======  =======  =======  =======  ========

    >>> import numpy as np
    >>> from bsrgemm._kernels.element_types import types
    >>> names = types(*[np.dtype("float32")] * 4, np.dtype("int32"))
    >>> sizes = {"R": 32, "K": 32, "N": 8192, "batches": 1, "block_rows": 256, "block_cols": 256, "blocks": 14400}
    >>> layout = {"transposed": False, "b_order": "C", "c_order": "C", "overwrite": True, "aligned": True, "tf32": True}
    >>> usual = Problem("sm_90a", names, **sizes, **layout)
    >>> [column_panel(replace(usual, **x)) for x in ({}, {"b_order": "F"}, {"blocks": 3000}, {"tf32": False})]
    [8192, 0, 0, 4096]
    """
    parts = column_parts(problem.tf32)
    by_columns = replace(problem, b_order="F", parts=parts)
    work = problem.blocks * problem.R * problem.K * problem.N * problem.batches
    uses = problem.blocks * problem.R / max(1, problem.block_cols)
    least, *least_uses = _WORTH_COLUMNS[parts]
    if not problem.types.of_one("f32") or (problem.tf32 and problem.b_order == "F") or work < least:
        return 0
    if problem.N < _LEAST_COLUMNS:
        return 0
    if uses < least_uses[(problem.R % 32 == 0) + (problem.R % 64 == 0)]:
        return 0
    if by_rows(by_columns) or not GemmSm90.serves(by_columns):
        return 0
    column = problem.block_cols * problem.K * problem.batches * parts * BYTES["f32"]
    if problem.N * column <= _PANEL_BYTES:
        return problem.N
    most = _PANEL_BYTES // column // _PANEL_COLUMNS * _PANEL_COLUMNS
    # A last panel of few columns would be computed by a kernel of the CUDA cores.
    widths = (n for n in range(most, 0, -_PANEL_COLUMNS) if not 0 < problem.N % n < _PANEL_COLUMNS // 4)
    return next(widths, 0)
