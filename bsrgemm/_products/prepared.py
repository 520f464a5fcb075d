"""Kernels that copy an operand so that another kernel can read it: a preparation is a kernel that holds a kernel.

Each starts a `Chain`: copies, and the launches that read them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import cupy
import numpy as np

from .._backend.base import Array, Backend
from .._kernels import forced_kernel
from .._kernels.card import Card, tensor_arch
from .._kernels.element_types import BYTES, Types
from .._kernels.launch import Chain, Launch
from .._kernels.rearrange import LINE, Lie, Rearrange
from . import tuned
from .call import Problem, order_of
from .choice import DENSE, variants
from .costs import memory
from .dense import Dense
from .operand import Kind, Operand, operand_of

#: The number of columns of a panel is a multiple of this.
_PANEL_COLUMNS = 256
#: A copy by columns has at most so many bytes; the product is computed in panels if B has more.
_PANEL_BYTES = 256 << 20
#: Copies of A's blocks and of the result have at most so many bytes together; larger products do without.
_MOST_BYTES = 4 << 30
#: Bytes that the memory reads or writes at least.
_SECTOR = 32
#: With fewer columns than this, copying complex A and B costs more than the tensor cores save.
_LEAST_COMPLEX_COLUMNS = 64
_REAL: dict[str, tuple[str, np.dtype[Any]]] = {
    "c64": ("f32", np.dtype(np.float32)),
    "c128": ("f64", np.dtype(np.float64)),
}


class Preparation(Dense):
    """A kernel that prepares an operand for another one. It is not compiled itself, and no variant of it is tried."""

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[Any]:
        yield from ()


@dataclass(frozen=True)
class Copied(Preparation):
    """Copy the blocks of A, or B, or the result, for a kernel that cannot take them as they lie, or is slower so.

    All copies are exact, or rounded as the kernel would round. What they need of memory is allocated for a call. B is
    copied and multiplied in panels of columns if its copy is large.
    """

    kernel: Dense
    #: "lines": blocks whose lines are multiples of 16 bytes; "turned": those of the transposed matrix; "turned lines":
    #: both
    blocks: str = ""
    #: "C" or "F": the order of a copy of B with such lines
    order: str = ""
    #: for a copy of float32 by columns: 1 if it is rounded to tf32, 2 for two parts
    parts: int = 0
    #: whether the result is written row by row elsewhere, and copied to its place
    result: bool = False

    costs: ClassVar = {
        "launch": 3.68, "copy": 0.58,
    }  # fmt: skip

    def copied(self, problem: Problem) -> Problem:
        """The product that the kernel computes."""
        return copied(problem, self.blocks, self.order, self.parts, self.result)

    def seconds(self, problem: Problem, card: Card) -> float:
        """The kernel, and the copies before and after it."""
        if self.bytes(problem) > _MOST_BYTES:
            return math.inf
        copies = 1e-6 * self.microseconds_of_copies(problem, card, self.costs)
        return self.kernel.seconds(self.copied(problem), card) + copies

    def bytes(self, problem: Problem) -> int:
        """The memory for copies of A's blocks and of the result; that for B is bounded by its panels."""
        names, inner = problem.types, self.copied(problem)
        blocks = problem.blocks * problem.R * max(inner.lines, problem.K) * BYTES[names.a] if self.blocks else 0
        lines = _whole_lines(problem.N, BYTES[names.c]) * BYTES[names.c]
        return blocks + (problem.batches * problem.block_rows * problem.R * lines if self.result else 0)

    def microseconds_of_copies(self, problem: Problem, card: Card, x: dict[str, float]) -> float:
        """A launch for each, and what they read and write, of each row of few columns at least a sector."""
        inner, launches, moved, names = self.copied(problem), 0, 0, problem.types
        panels = -(-problem.N // panel_width(problem, self.order, self.parts))
        if self.blocks:
            launches, moved = 1, problem.blocks * problem.R * (problem.K + inner.lines) * BYTES[names.a]
        if self.order:
            rows = problem.batches * problem.block_cols * problem.K
            launches += panels
            moved += rows * max(_SECTOR, problem.N * BYTES[names.b]) * (1 + max(1, self.parts))
        if self.result:
            rows = problem.batches * problem.block_rows * problem.R
            launches, moved = launches + panels, moved + 2 * rows * max(_SECTOR, problem.N * BYTES[names.c])
        return launches * x["launch"] + memory(card, moved) / x["copy"]

    def prepare(self, call: Kind, card: Card) -> Chain:
        problem, inner, operand = call.problem, self.copied(call.problem), call.operand
        rooms: list[tuple[tuple[int, ...], np.dtype[Any]]] = []
        steps: list[Any] = []
        if self.blocks:
            operand, copy, room = self._copied_blocks(call, inner)
            stored = call.operand.arrays[0]
            rooms.append(room)
            steps.append(lambda arrays, *_: copy.start((stored, arrays[2])))
        width = panel_width(problem, self.order, self.parts)
        for first in range(0, problem.N, width):
            n = min(width, problem.N - first)
            B, out, copy_b = _columns(call.B, first, n), _columns(call.out, first, n), None
            if self.order:
                to = _lie_of_copy(B, self.order, self.parts)
                copy_b = Rearrange.copying(_batch(B), _batch(to), parts=self.parts)
                if first == 0:
                    rooms.append(((to.size * max(1, self.parts),), B.dtype))
                B = to
            copy_c = None
            if self.result:
                written = _lie_of_copy(out, "C", 0)
                copy_c = Rearrange.copying(
                    _batch(written), _batch(Lie(out.dtype, out.shape, out.strides, out.data.ptr))
                )
                if first == 0:
                    rooms.append(((written.size,), out.dtype))
                out = written
            kind = replace(inner, N=n, c_order=order_of(out))
            kernel = self.kernel if n == problem.N else type(self.kernel).best(kind)
            launch = kernel.prepare(Kind(kind, operand, B, out, bool(self.blocks)), card)
            steps.append(_Panel(first, n, bool(self.blocks), copy_b, launch, copy_c))
        # Without memory for the copies, the product takes the operands themselves, and the next call tries again.
        return Chain(steps, rooms, otherwise=lambda: fastest(problem, card, False).prepare(call, card))

    def _copied_blocks(self, call: Kind, inner: Problem) -> tuple[Operand, Launch, tuple[Any, Any]]:
        """The matrix whose blocks are the copy, what makes the copy, and its shape and dtype."""
        data, line = call.operand.arrays[0], inner.lines
        operand, places = call.operand, None
        if self.blocks.startswith("turned"):
            indices, bounds, places = operand.index(call.stored_columns, True)
            data = data.swapaxes(1, 2)
            shape = (inner.block_rows * inner.R, inner.block_cols * inner.K)
            operand = operand.remembered(
                ("turned", call.stored_columns), lambda: operand.derived(data, indices, bounds, shape)
            )
        to = Lie.in_order(data.dtype, (*data.shape[:2], line))
        return operand, Rearrange.copying(data, to, places=places), (to.shape, to.dtype)


@dataclass(frozen=True)
class _Panel:
    """The step that copies some columns of B, if they are copied, and multiplies them."""

    first: int
    count: int
    blocks: bool
    copy_b: Launch | None
    launch: Any
    copy_c: Launch | None

    def __call__(self, arrays: Any, *numbers: Any) -> None:
        B, out, *rooms = arrays
        B, out = _columns(B, self.first, self.count), _columns(out, self.first, self.count)
        data = rooms[:1] if self.blocks else []
        if self.copy_b is not None:
            self.copy_b.start((B, rooms[len(data)]))
            B = rooms[len(data)]
        written = out if self.copy_c is None else rooms[-1]
        self.launch.start((B, written, *data), *numbers)
        if self.copy_c is not None:
            self.copy_c.start((written, out))


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
        inner = choose(kind, card).prepare(Kind(kind, operand, *lies), card)
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


def options(problem: Problem, copies: bool = True) -> Iterator[Dense]:
    """Yield everything that can compute a product: kernels as they are, and kernels with copies of their operands."""
    if not copies:
        yield from (kernel.best(problem) for kernel in DENSE if kernel.serves(problem))
        return
    plain = problem.c_order == "C" or not problem.overwrite or problem.N == 1
    results = (False,) if plain else (False, True)
    for blocks, (order, parts), result in itertools.product(_copies_of_blocks(problem), _copies_of_B(problem), results):
        if not panel_width(problem, order, parts):
            continue
        inner = copied(problem, blocks, order, parts, result)
        for kernel in DENSE:
            if (inner.line and not kernel.reads_lines) or not kernel.serves(inner):
                continue
            best = kernel.best(inner)
            yield Copied(best, blocks, order, parts, result) if blocks or order or result else best


def copied(problem: Problem, blocks: str, order: str, parts: int, result: bool = False) -> Problem:
    """The product with copies of operands (see `Copied`)."""
    if blocks:
        turned = blocks.startswith("turned")
        stored = replace(problem, transposed=problem.transposed and not turned, aligned=True, line=0, turned=turned)
        line = _whole_lines(stored.lines, BYTES[problem.types.a])
        problem = replace(stored, line=line) if blocks.endswith("lines") and line > stored.lines else stored
    if order:
        problem = replace(problem, b_order=order, parts=max(1, parts))
    return replace(problem, c_order="C") if result else problem


def _copies_of_blocks(problem: Problem) -> Iterator[str]:
    yield ""
    if not problem.aligned or problem.lines * BYTES[problem.types.a] % LINE:
        yield "lines"
    if problem.transposed:
        yield "turned"
        if problem.K * BYTES[problem.types.a] % LINE:
            yield "turned lines"


def _copies_of_B(problem: Problem) -> Iterator[tuple[str, int]]:
    yield "", 0
    if problem.N == 1:
        return
    if problem.b_order != "C" and problem.types.a != "e4m3":
        yield "C", 0
    if problem.types.of_one("f32") and problem.arch == "sm_90a":
        if not problem.tf32:
            yield "F", 2
        elif problem.b_order != "F":
            yield "F", 1
    elif problem.types.a == "e4m3" and problem.b_order != "F":
        yield "F", 0


def panel_width(problem: Problem, order: str, parts: int) -> int:
    """The number of columns of B that are copied and multiplied at a time; 0 if no copy of some is small enough.

    A last panel of a few columns would be computed by a kernel for few columns, which may not read such a copy.
    """
    if not order:
        return problem.N
    rows = _whole_lines(problem.block_cols * problem.K, BYTES[problem.types.b])
    column = rows * problem.batches * BYTES[problem.types.b] * max(1, parts)
    if problem.N * column <= _PANEL_BYTES:
        return problem.N
    most = _PANEL_BYTES // column // _PANEL_COLUMNS * _PANEL_COLUMNS
    return next((n for n in range(most, 0, -_PANEL_COLUMNS) if not 0 < problem.N % n < _PANEL_COLUMNS // 4), 0)


def _whole_lines(elements: int, size: int) -> int:
    """The elements of a line that is a multiple of 16 bytes."""
    return -(-elements * size // LINE) * LINE // size


def _lie_of_copy(B: Any, order: str, parts: int) -> Lie:
    """How a copy of B lies, row by row or column by column; the parts of each matrix of a batch lie side by side."""
    *outer, rows, columns = B.shape
    size = B.itemsize
    if order == "C":
        pitch = _whole_lines(columns, size) * size
        return Lie(B.dtype, (*outer, rows, columns), (*(rows * pitch for _ in outer), pitch, size))
    pitch = _whole_lines(rows, size) * size
    return Lie(B.dtype, (*outer, rows, columns), (*(max(1, parts) * columns * pitch for _ in outer), size, pitch))


def _batch(x: Any) -> Any:
    """A matrix as a batch of one."""
    if x.ndim == 3:
        return x
    return Lie(x.dtype, (1, *x.shape), (x.strides[0] * x.shape[0], *x.strides), x.data.ptr)


def compiled_for(problem: Problem, card: Card) -> Dense:
    """Return the kernel that multiplies where nothing is forced or tuned; those that copy are few."""
    found = fastest(problem, card, True)
    return found.kernel if isinstance(found, Copied) else found


def choose(problem: Problem, card: Card, copies: bool = True) -> Dense:
    """Return the kernel for a product: the forced one, the one that `tune` has stored, or the fastest by prediction.

    With `copies` it may be a preparation, which copies an operand for another kernel.
    """
    forced = forced_kernel.name
    if copies and RealViews.serves(problem):
        return RealViews.best(problem)
    if forced is None:
        stored = tuned.stored(problem)
        return fastest(problem, card, copies) if stored is None else stored
    for kernel in (*variants(problem), *options(problem, copies)):
        if type(kernel.kernel if isinstance(kernel, Copied) else kernel).__name__ == forced:
            return kernel
    raise ValueError(f"{forced} cannot multiply this: {problem}")


@lru_cache(maxsize=4096)
def fastest(problem: Problem, card: Card, copies: bool) -> Dense:
    """The option with the shortest predicted time, the first one of equals."""
    return min(options(problem, copies), key=lambda kernel: kernel.seconds(problem, card))


def _columns(x: Any, first: int, count: int) -> Any:
    """Some columns of an operand, or of one that is not there yet."""
    if first == 0 and count == x.shape[-1]:
        return x
    return x.columns(first, count) if isinstance(x, Lie) else x[..., first : first + count]
