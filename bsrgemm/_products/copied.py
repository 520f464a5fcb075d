"""Copies of operands for a kernel that cannot take them as they lie, or is slower so."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from .._kernels.card import Card
from .._kernels.element_types import BYTES, Types
from .._kernels.launch import Chain, Launch, Room
from .._kernels.rearrange import LINE, Form, Lie, Rearrange
from ..dtypes import BFLOAT16
from .call import MOST_BYTES, Problem, order_of_result
from .choice import plain
from .costs import memory
from .dense import Holder
from .operand import Kind, Operand

#: The number of columns of a panel is a multiple of this.
_PANEL_COLUMNS = 256
#: A copy by columns has at most so many bytes; the product is computed in panels if B has more.
_PANEL_BYTES = 256 << 20
#: Bytes that the memory reads or writes at least.
_SECTOR = 32
#: fp8 is widened to one of these: the dtype and how it is written.
_WIDER: dict[str, tuple[np.dtype[Any], Form]] = {
    "f16": (np.dtype(np.float16), Form.F16),
    "bf16": (BFLOAT16, Form.BF16),
}


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
    #: "f16" or "bf16", if the blocks and B are fp8 and their copies are not
    wider: str = ""

    costs: ClassVar = {
        "launch": 3.55, "copy": 0.414,
    }  # fmt: skip

    def inner(self, problem: Problem) -> Problem:
        """The product that the kernel computes."""
        return copied(problem, self)

    def around(self, problem: Problem, inner: Problem, card: Card) -> float:
        """The copies before and after the kernel."""
        if self.bytes(problem, inner) > MOST_BYTES:
            return math.inf
        return 1e-6 * self.microseconds_of_copies(problem, inner, card)

    def _form(self) -> Form:
        """What is written of a number of B."""
        return _WIDER[self.wider][1] if self.wider else Form(self.parts)

    def bytes(self, problem: Problem, inner: Problem) -> int:
        """The memory for copies of A's blocks and of the result; that for B is bounded by its panels."""
        names = problem.types
        blocks = problem.blocks * problem.R * max(inner.lines, problem.K) * BYTES[inner.types.a] if self.blocks else 0
        lines = whole_lines(problem.N, BYTES[names.c]) * BYTES[names.c]
        return blocks + (problem.batches * problem.block_rows * problem.R * lines if self.result else 0)

    def microseconds_of_copies(self, problem: Problem, inner: Problem, card: Card) -> float:
        """A launch for each, and what they read and write, of each row of few columns at least a sector."""
        x = self.costs
        launches, moved, names, size = 0, 0, problem.types, BYTES[inner.types.a]
        panels = -(-problem.N // panel_width(problem, self))
        if self.blocks:
            launches = 1
            moved = problem.blocks * problem.R * (problem.K * BYTES[names.a] + inner.lines * size)
        if self.order:
            rows = problem.batches * problem.block_cols * problem.K
            read, written = (max(_SECTOR, problem.N * n) for n in (BYTES[names.b], size))
            launches += panels
            moved += rows * (read + written * max(1, self.parts))
        if self.result:
            rows = problem.batches * problem.block_rows * problem.R
            launches, moved = launches + panels, moved + 2 * rows * max(_SECTOR, problem.N * BYTES[names.c])
        return launches * x["launch"] + memory(card, moved) / x["copy"]

    def prepare(self, call: Kind, card: Card) -> Chain:
        problem, inner, operand = call.problem, self.inner(call.problem), call.operand
        rooms: list[tuple[tuple[int, ...], np.dtype[Any]]] = []
        steps: list[Any] = []
        own, lie = 3 if call.copied else 2, call.lie  # the first room, behind the operands
        if self.blocks:
            operand, copy, lie, room = self._copied_blocks(call, inner)
            stored = call.operand.arrays[0]
            rooms.append(room)
            given = 2 if call.copied else None
            steps.append(lambda arrays, *_: copy.start((arrays[given] if given else stored, arrays[own])))
        width = panel_width(problem, self)
        for first in range(0, problem.N, width):
            n = min(width, problem.N - first)
            B, out, copy_b = _columns(call.B, first, n), _columns(call.out, first, n), None
            if self.order:
                to = self._copy_of_b(B)
                copy_b = Rearrange.copying(as_batch(B), as_batch(to), form=self._form(), part=_part(to))
                if first == 0:
                    rooms.append(((to.size * max(1, self.parts),), to.dtype))
                B = to
            copy_c = None
            if self.result:
                written = _rows(out.shape, out.dtype)
                copy_c = Rearrange.copying(
                    as_batch(written), as_batch(Lie(out.dtype, out.shape, out.strides, out.data.ptr))
                )
                if first == 0:
                    rooms.append(((written.size,), out.dtype))
                out = written
            kind = replace(inner, N=n, c_order=order_of_result(out))
            kernel = self.kernel if n == problem.N else type(self.kernel).best(kind)
            data = own if self.blocks else 2 if call.copied else None
            places = first * call.B.strides[-1], first * call.out.strides[-1]
            launch = kernel.prepare(Kind(kind, operand, B, out, data is not None, lie), card)
            steps.append(_Panel(places, data, own + bool(self.blocks), copy_b, launch, copy_c))
        # Without memory for the copies, the product takes the operands themselves, and the next call tries again.
        return Chain(steps, rooms, otherwise=lambda: plain(problem, card).prepare(call, card))

    def _copied_blocks(self, call: Kind, inner: Problem) -> tuple[Operand, Launch, Lie, tuple[Any, Any]]:
        """The matrix of the copied blocks, what copies them, how they lie but for longer lines, and their room."""
        data, operand, places = call.blocks if call.copied else call.operand.arrays[0], call.operand, None
        dtype, form = _WIDER.get(self.wider, (data.dtype, Form.AS_IT_IS))
        if self.blocks.startswith("turned"):
            indices, bounds, places = operand.index(call.stored_columns, True)
            data = data.swapaxes(1, 2)
            shape = (inner.block_rows * inner.R, inner.block_cols * inner.K)
            operand = operand.remembered(
                ("turned", call.stored_columns), lambda: call.operand.derived(data, indices, bounds, shape)
            )
        to = Lie.in_order(dtype, (*data.shape[:2], inner.lines))
        copy = Rearrange.copying(data, to, places=places, form=form)
        return operand, copy, Lie.in_order(dtype, tuple(data.shape)), (to.shape, to.dtype)

    def _copy_of_b(self, B: Any) -> Lie:
        """How a copy of B lies, row by row or column by column; the parts of a matrix of a batch lie side by side."""
        dtype = _WIDER[self.wider][0] if self.wider else B.dtype
        if self.order == "C":
            return _rows(B.shape, dtype)
        *outer, rows, columns = B.shape
        pitch = whole_lines(rows, dtype.itemsize) * dtype.itemsize
        batch = max(1, self.parts) * columns * pitch
        return Lie(dtype, tuple(B.shape), (*(batch for _ in outer), dtype.itemsize, pitch))


@dataclass(frozen=True)
class _Panel:
    """The step that copies some columns of B, if they are copied, and multiplies them."""

    #: where these columns of B and of the result begin, in bytes
    places: tuple[int, int]
    #: which of the arrays of the chain are the blocks of A, if they were copied, and the copy of B
    data: int | None
    room: int
    copy_b: Launch | None
    launch: Any
    copy_c: Launch | None

    def __call__(self, arrays: Any, *numbers: Any) -> None:
        B, out = (Room(x.data + at) if at else x for x, at in zip(arrays, self.places, strict=False))
        data = [] if self.data is None else [arrays[self.data]]
        if self.copy_b is not None:
            self.copy_b.start((B, arrays[self.room]))
            B = arrays[self.room]
        written = out if self.copy_c is None else arrays[-1]
        self.launch.start((B, written, *data), *numbers)
        if self.copy_c is not None:
            self.copy_c.start((written, out))


def copied(problem: Problem, copy: Copied) -> Problem:
    """The product with copies of operands."""
    changes: dict[str, Any] = {}
    names = problem.types
    if copy.wider:
        names = changes["types"] = Types(copy.wider, copy.wider, names.c, names.acc, names.index)
    if copy.blocks:
        turned = copy.blocks.startswith("turned")
        size, lines = BYTES[names.a], problem.K if turned or not problem.transposed else problem.R
        line = whole_lines(lines, size) if copy.blocks.endswith("lines") else lines
        changes |= {"aligned": True, "turned": turned, "line": line if line > lines else 0}
        changes["transposed"] = problem.transposed and not turned
    if copy.order:
        changes |= {"b_order": copy.order, "parts": max(1, copy.parts)}
    if copy.result:
        changes["c_order"] = "C"
    return replace(problem, **changes)


def copies_of(problem: Problem) -> Iterator[Copied]:
    """Yield the copies that some kernel can read and could not read, or not as fast, without them."""
    in_place = problem.c_order == "C" or not problem.overwrite or problem.N == 1
    results = (False,) if in_place else (False, True)
    for blocks, (order, parts), result in itertools.product(_copies_of_blocks(problem), _copies_of_B(problem), results):
        if blocks or order or result:
            yield Copied(None, blocks, order, parts, result)
    if problem.types.a == problem.types.b == "e4m3":
        wider = "bf16" if problem.types.c == "bf16" else "f16"
        blocks = "turned lines" if problem.transposed else "lines"
        yield from (Copied(None, blocks, "C", 0, result, wider) for result in results)


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


def panel_width(problem: Problem, copy: Copied) -> int:
    """The number of columns of B that are copied and multiplied at a time; 0 if no copy of some is small enough.

    A last panel of a few columns would be computed by a kernel for few columns, which may not read such a copy.
    """
    if not copy.order:
        return problem.N
    size = BYTES[copy.wider or problem.types.b]
    rows = whole_lines(problem.block_cols * problem.K, size)
    column = rows * problem.batches * size * max(1, copy.parts)
    if problem.N * column <= _PANEL_BYTES:
        return problem.N
    most = _PANEL_BYTES // column // _PANEL_COLUMNS * _PANEL_COLUMNS
    return next((n for n in range(most, 0, -_PANEL_COLUMNS) if not 0 < problem.N % n < _PANEL_COLUMNS // 4), 0)


def whole_lines(elements: int, size: int) -> int:
    """The elements of a line that is a multiple of 16 bytes."""
    return -(-elements * size // LINE) * LINE // size


def _rows(shape: Any, dtype: np.dtype[Any]) -> Lie:
    """How a copy lies row by row, in lines of whole 16 bytes."""
    *outer, rows, columns = shape
    pitch = whole_lines(columns, dtype.itemsize) * dtype.itemsize
    return Lie(dtype, tuple(shape), (*(rows * pitch for _ in outer), pitch, dtype.itemsize))


def _part(to: Lie) -> int:
    """The elements from the first part of a number to the second: behind all columns."""
    return to.shape[-1] * to.strides[-1] // to.itemsize


def as_batch(x: Any) -> Any:
    """A matrix as a batch of one."""
    if x.ndim == 3:
        return x
    return Lie(x.dtype, (1, *x.shape), (x.strides[0] * x.shape[0], *x.strides), x.data.ptr)


def _columns(x: Any, first: int, count: int) -> Any:
    """Some columns of an operand, or of one that is not there yet."""
    if first == 0 and count == x.shape[-1]:
        return x
    return x.columns(first, count) if isinstance(x, Lie) else x[..., first : first + count]
