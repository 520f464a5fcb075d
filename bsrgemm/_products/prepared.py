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
from .._backend.index_arrays import Unwritten
from .._kernels.card import Card, tensor_arch
from .._kernels.element_types import BYTES, Types
from .._kernels.kernel import Kernel
from .._kernels.launch import Chain, Launch
from .._kernels.rearrange import LINE, Lie, Rearrange
from . import tuned
from .call import Problem, order_of
from .choice import DENSE, variants
from .costs import memory, operand_bytes
from .dense import Dense, Preparation, Tiled
from .filled import Fill, Mend, filled
from .operand import Kind, Operand, operand_of

#: The number of columns of a panel is a multiple of this.
_PANEL_COLUMNS = 256
#: A copy by columns has at most so many bytes; the product is computed in panels if B has more.
_PANEL_BYTES = 256 << 20
#: Copies of A's blocks and of the result have at most so many bytes together; larger products do without.
_MOST_BYTES = 4 << 30
#: Bytes that the memory reads or writes at least.
_SECTOR = 32
_REAL: dict[str, tuple[str, np.dtype[Any]]] = {
    "c64": ("f32", np.dtype(np.float32)),
    "c128": ("f64", np.dtype(np.float64)),
}


@dataclass(frozen=True)
class Holder(Preparation):
    """A preparation that holds the kernel, or another preparation, which computes what is prepared."""

    kernel: Any

    def inner(self, problem: Problem) -> Problem:
        """The product that the kernel computes."""
        raise NotImplementedError

    def around(self, problem: Problem, inner: Problem, card: Card) -> float:
        """Seconds of what is done before and after it."""
        raise NotImplementedError

    def seconds(self, problem: Problem, card: Card) -> float:
        inner = self.inner(problem)
        found: float = self.kernel.seconds(inner, card) + self.around(problem, inner, card)
        return found


@dataclass(frozen=True)
class Copied(Holder):
    """Copy the blocks of A, or B, or the result, for a kernel that cannot take them as they lie, or is slower so.

    All copies are exact, or rounded as the kernel would round. What they need of memory is allocated for a call. B is
    copied and multiplied in panels of columns if its copy is large.
    """

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

    def inner(self, problem: Problem) -> Problem:
        """The product that the kernel computes."""
        return copied(problem, self.blocks, self.order, self.parts, self.result)

    def around(self, problem: Problem, inner: Problem, card: Card) -> float:
        """The copies before and after the kernel."""
        if self.bytes(problem, inner) > _MOST_BYTES:
            return math.inf
        return 1e-6 * self.microseconds_of_copies(problem, inner, card)

    def bytes(self, problem: Problem, inner: Problem) -> int:
        """The memory for copies of A's blocks and of the result; that for B is bounded by its panels."""
        names = problem.types
        blocks = problem.blocks * problem.R * max(inner.lines, problem.K) * BYTES[names.a] if self.blocks else 0
        lines = _whole_lines(problem.N, BYTES[names.c]) * BYTES[names.c]
        return blocks + (problem.batches * problem.block_rows * problem.R * lines if self.result else 0)

    def microseconds_of_copies(self, problem: Problem, inner: Problem, card: Card) -> float:
        """A launch for each, and what they read and write, of each row of few columns at least a sector."""
        x = self.costs
        launches, moved, names = 0, 0, problem.types
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
        problem, inner, operand = call.problem, self.inner(call.problem), call.operand
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
            has_data = bool(self.blocks) or call.copied
            launch = kernel.prepare(Kind(kind, operand, B, out, has_data), card)
            steps.append(_Panel(first, n, has_data, copy_b, launch, copy_c))
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
    #: whether the third array is a copy of A's blocks, made here or before
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


@dataclass(frozen=True)
class Filled(Holder):
    """Fill the matrix up with zeros, and multiply it as one block row of large blocks.

    Small and odd blocks leave tensor cores idle: where enough of the matrix is stored, the dense product is faster.
    What is not finite afterwards is computed again from what is stored, and so is a block row that has a block twice.
    """

    costs: ClassVar = {
        "t0": 13.5, "fill": 0.525, "store": 0.0626, "read": 0.296,
    }  # fmt: skip

    @classmethod
    def serves(cls, problem: Problem) -> bool:
        columns, size = problem.block_cols * problem.K, BYTES[problem.types.a]
        return (
            problem.block_rows > 1
            and problem.blocks > 0
            and problem.overwrite
            and problem.parts == 1
            and problem.line == 0
            and not problem.turned
            and max(columns + LINE, problem.R * problem.K) < 2**31
            and problem.block_rows * problem.R * (columns * size + LINE) <= _MOST_BYTES
        )

    @classmethod
    def best(cls, problem: Problem) -> Filled:
        raise NotImplementedError("the kernel of a filled matrix is one of many options")

    def inner(self, problem: Problem) -> Problem:
        return filled(problem)

    def around(self, problem: Problem, inner: Problem, card: Card) -> float:
        """The filled matrix is written, and the result is read."""
        x = self.costs
        stored, _, result = operand_bytes(problem)
        written = inner.blocks * inner.R * inner.lines * BYTES[problem.types.a]
        around = [memory(card, n) / x[of] for n, of in ((stored, "store"), (written, "fill"), (result, "read"))]
        return 1e-6 * (x["t0"] + float(sum(around)))

    def prepare(self, call: Kind, card: Card) -> Chain:
        problem, inner, stored = call.problem, filled(call.problem), call.operand.arrays[0]
        data = Lie.in_order(stored.dtype, (inner.blocks, inner.R, inner.lines))
        operand = call.operand.remembered(("filled", inner.R, inner.K), lambda: self._operand(call, inner))
        launch = self.kernel.prepare(Kind(inner, operand, call.B, call.out, True), card)
        names = problem.types
        fill, shape = Fill(BYTES[names.a], names.index).prepare(call, card)
        mend = Mend(names, problem.transposed).mending(call, shape[1] * shape[2])

        def otherwise() -> Any:
            return fastest(problem, card, False).prepare(call, card)

        def multiply(arrays: Any, alpha: Any, beta: Any) -> None:
            B, out, full, twice = arrays
            fill.start((stored, full, twice))
            launch.start((B, out, full), alpha, beta)
            mend.start((B, out, twice), alpha, beta)

        return Chain([multiply], [(data.shape, data.dtype), (shape, np.dtype(np.uint8))], otherwise)

    @staticmethod
    def _operand(call: Kind, inner: Problem) -> Operand:
        """The filled matrix: one block row, all of whose blocks are stored."""
        dtype, line = call.operand.arrays[0].dtype, inner.lines * BYTES[inner.types.a]
        data = Lie(dtype, (inner.blocks, inner.R, inner.K), (inner.R * line, line, dtype.itemsize))
        indices = cupy.arange(inner.blocks, dtype=np.int32)
        bounds = cupy.arange(0, inner.blocks + 1, inner.blocks, dtype=np.int32)
        return call.operand.derived(data, indices, bounds, (inner.R, inner.block_cols * inner.K))


@dataclass(slots=True)
class _RealMatrix:
    """The real matrix [Re A, Im A] of a complex matrix A, with only those attributes that a product reads."""

    data: Array
    _index: tuple[Array, Array]
    _shape: tuple[int, int]
    _backend: Backend
    _memo: Operand | None = None

    def _state(self) -> Unwritten:
        return Unwritten(*self._index)


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
            and problem.line == 0
            and 0 < 2 * problem.blocks * problem.R * problem.K < 2**31
            and tensor_arch(problem.arch)
        )

    @classmethod
    def best(cls, problem: Problem) -> RealViews:
        return cls()

    costs: ClassVar = {
        "launch": 3.68, "launches": 7.0, "copy": 0.4,
    }  # fmt: skip

    @staticmethod
    def real(problem: Problem, aligned: bool = True) -> Problem:
        """The product of real matrices."""
        name, dtype = _REAL[problem.types.a]
        written = Lie.in_order(dtype, (problem.block_rows * problem.R, 2 * problem.N))
        return replace(
            problem, types=Types(name, name, name, name, problem.types.index), K=2 * problem.K, N=2 * problem.N,
            b_order="C", c_order=order_of(written), overwrite=True, aligned=aligned,
        )  # fmt: skip

    def seconds(self, problem: Problem, card: Card) -> float:
        """The real product, and what is written of A, and of B twice."""
        x, (a, b, _) = self.costs, operand_bytes(problem)
        copies = x["launches"] * x["launch"] + memory(card, 3 * a, 6 * b) / x["copy"]
        inner = self.real(problem)
        return fastest(inner, card, True).seconds(inner, card) + 1e-6 * copies

    def prepare(self, call: Kind, card: Card) -> Chain:
        problem, out = call.problem, call.out
        real = _REAL[problem.types.a][1]
        K, N, rows = problem.K, problem.N, problem.block_cols * problem.K
        A, axis = call.operand, 1 if problem.transposed else 2
        wide = self._real_matrix(A, real, axis)
        operand = operand_of(wide)
        width = _whole_lines(2 * N, real.itemsize)
        panel = Lie(real, (2 * rows, 2 * N), (width * real.itemsize, real.itemsize))
        written = Lie.in_order(real, (problem.block_rows * problem.R, 2 * N))
        kind = self.real(problem, operand.pointer % 16 == 0)
        inner = choose(kind, card).prepare(Kind(kind, operand, panel, written), card)
        data, overwrite = A.source[0], problem.overwrite
        direct = overwrite and out.flags.c_contiguous and out.data.ptr % 16 == 0

        def multiply(arrays: Any, alpha: Any, beta: Any) -> None:
            B, out = arrays
            panels = cupy.empty((rows // K, 2, K, width // 2, 2), real)
            real_b = panels.reshape(2 * rows, width)[:, : 2 * N]
            panels = panels[..., :N, :]
            left, right = cupy.split(wide.data, 2, axis=axis)
            left[...], right[...] = data.real, data.imag
            parts = B.reshape(rows // K, K, N)
            panels[:, 0, :, :, 0] = panels[:, 1, :, :, 1] = parts.real  # B and iB for each block column of A
            panels[:, 0, :, :, 1] = parts.imag
            cupy.negative(parts.imag, out=panels[:, 1, :, :, 0])
            straight = direct and isinstance(alpha, int | float)
            result = out.reshape(-1, N) if straight else cupy.empty((problem.block_rows * problem.R, N), out.dtype)
            inner.start((real_b, result.view(real)), alpha if straight else 1, 0)
            if not straight:
                result *= alpha
                result = result.reshape(out.shape)
                out[...] = result if overwrite else result + beta * out

        return Chain([multiply], [])

    @staticmethod
    def _real_matrix(A: Operand, real: np.dtype[Any], axis: int) -> _RealMatrix:
        """Return the real matrix whose blocks are [Re, Im] of the blocks of A, without its values."""
        found: _RealMatrix | None = A.wide.get(axis)
        if found is None:
            data, *index = A.source
            sides, shape = list(data.shape), list(A.shape)
            sides[axis] *= 2
            shape[axis - 1] *= 2
            found = _RealMatrix(cupy.empty(sides, real), (index[0], index[1]), (shape[0], shape[1]), A.backend)
            A.wide[axis] = found
        return found


def options(problem: Problem, copies: bool = True) -> Iterator[Dense]:
    """Yield everything that can compute a product: kernels as they are, and kernels with copies of their operands."""
    for way, inner in _ways(problem) if copies else [((), problem)]:
        yield from (_held(way, kernel) for kernel in _serving(way, inner))
    if copies and RealViews.serves(problem):
        yield RealViews.best(problem)


#: Preparations around each other, each with the product that is asked of it, the outermost first.
Way = tuple[tuple[Holder, Problem], ...]


def _ways(problem: Problem) -> Iterator[tuple[Way, Problem]]:
    """Yield how operands can be prepared, and the product that a kernel computes then; first not at all."""
    yield from _with_copies((), problem)
    if Filled.serves(problem):
        yield from _with_copies(((Filled(None), problem),), filled(problem))


def _with_copies(way: Way, problem: Problem) -> Iterator[tuple[Way, Problem]]:
    plain = problem.c_order == "C" or not problem.overwrite or problem.N == 1
    results = (False,) if plain else (False, True)
    for blocks, (order, parts), result in itertools.product(_copies_of_blocks(problem), _copies_of_B(problem), results):
        if not (blocks or order or result):
            yield way, problem
        elif panel_width(problem, order, parts):
            inner = copied(problem, blocks, order, parts, result)
            yield (*way, (Copied(None, blocks, order, parts, result), problem)), inner


def _serving(way: Way, problem: Problem) -> Iterator[Dense]:
    """The kernels for a product that was prepared; only tensor cores are worth a filled matrix."""
    is_filled = bool(way) and isinstance(way[0][0], Filled)
    for kernel in DENSE:
        if is_filled and not issubclass(kernel, Tiled):
            continue
        if (kernel.reads_lines or not problem.line) and kernel.serves(problem):
            yield kernel.best(problem)


def _held(way: Way, kernel: Dense) -> Dense:
    for holder, _ in reversed(way):
        kernel = replace(holder, kernel=kernel)
    return kernel


def _around(way: Way, inner: Problem, card: Card) -> float:
    """Seconds of all preparations."""
    total = 0.0
    for holder, problem in reversed(way):
        total += holder.around(problem, inner, card)
        inner = problem
    return total


def copied(problem: Problem, blocks: str, order: str, parts: int, result: bool = False) -> Problem:
    """The product with copies of operands (see `Copied`)."""
    changes: dict[str, Any] = {}
    if blocks:
        turned = blocks.startswith("turned")
        size, lines = BYTES[problem.types.a], problem.K if turned or not problem.transposed else problem.R
        line = _whole_lines(lines, size) if blocks.endswith("lines") else lines
        changes = {"aligned": True, "turned": turned, "line": line if line > lines else 0}
        changes["transposed"] = problem.transposed and not turned
    if order:
        changes |= {"b_order": order, "parts": max(1, parts)}
    if result:
        changes["c_order"] = "C"
    return replace(problem, **changes) if changes else problem


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
    return compiled_for(RealViews.real(problem), card) if isinstance(found, RealViews) else innermost(found)


def innermost(kernel: Any) -> Dense:
    """The kernel that multiplies, behind all preparations."""
    while isinstance(kernel, Holder):
        kernel = kernel.kernel
    assert isinstance(kernel, Dense)
    return kernel


def choose(problem: Problem, card: Card, copies: bool = True) -> Dense:
    """Return the kernel for a product: the forced one, the one that `tune` has stored, or the fastest by prediction.

    With `copies` it may be a preparation, which copies an operand for another kernel.
    """
    forced = Kernel.forced
    if forced is None:
        stored = tuned.stored(problem)
        return fastest(problem, card, copies) if stored is None else stored
    for kernel in (*variants(problem), *options(problem, copies)):
        if type(innermost(kernel)).__name__ == forced or isinstance(kernel, RealViews):  # whose real product is forced
            return kernel
    raise ValueError(f"{forced} cannot multiply this: {problem}")


@lru_cache(maxsize=4096)
def fastest(problem: Problem, card: Card, copies: bool) -> Dense:
    """The option with the shortest predicted time, the first one of equals."""
    best, least = next(options(problem, False), None), math.inf
    for way, inner in _ways(problem) if copies else [((), problem)]:
        around = _around(way, inner, card)
        if around >= least:  # whatever it holds, the product is slower
            continue
        for kernel in _serving(way, inner):
            seconds = kernel.seconds(inner, card) + around
            if seconds < least:
                best, least = _held(way, kernel), seconds
    if copies and RealViews.serves(problem) and (best is None or RealViews().seconds(problem, card) < least):
        best = RealViews.best(problem)
    if best is None:
        raise ValueError(f"no kernel can multiply this: {problem}")
    return best


def _columns(x: Any, first: int, count: int) -> Any:
    """Some columns of an operand, or of one that is not there yet."""
    if first == 0 and count == x.shape[-1]:
        return x
    return x.columns(first, count) if isinstance(x, Lie) else x[..., first : first + count]
