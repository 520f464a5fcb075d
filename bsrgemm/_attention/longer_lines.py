"""Copies of operands with longer lines, for AttentionSm90: of keys and values whose heads are an odd multiple of 16
bytes, and of all that TMA cannot read in fp8.

TMA reads K and V in lines of 128 bytes and what is left of a head. Heads of 72, 88, 104 and 120 columns in 16 bits have
lines of 144, 176, 208 and 240 bytes: one in two begins in the middle of a sector of 32 bytes, and such calls wait for
TMA. A copy has as many columns as the kernel, the last ones zero, and each of its lines begins at a multiple of 128
bytes; the result has the same bits. Queries and results are read and written once, and are not copied.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import cupy
import numpy as np

from .._backend.base import Array
from .._kernels.card import Card
from .._kernels.launch import Chain, Launch, Step
from .._kernels.rearrange import Lie, Rearrange
from .attention_sm90 import AttentionSm90
from .call import AttentionCall
from .forward import Forward, mappable, share_of_blocks

_LINE, _SECTOR = 128, 32
#: Kernels with fewer columns copy one box for a tile of keys, those with more wait for the tensor cores.
_COLUMNS = range(65, 129)
#: Cycles that a line of K or V costs more than one of a copy. Mean of .30 to .51 us for 128 keys and values of heads of
#: 72, 88 and 104 columns on an H200, full and causal, 4,096 and 16,384 tokens (bench/NOTES.md).
_LATE_CYCLES = 2.9
#: Seconds of the launch of a copy, and the share of the bandwidth of memory at which it reads and writes.
_LAUNCH, _COPY_RATE = 3.7e-6, 0.58
#: Copies have at most so many bytes together; larger calls read the operands as they lie.
MOST_BYTES = 1 << 30


class Copy(NamedTuple):
    """A copy of keys or values: operand and copy as batches of matrices, and the copy as the kernel reads it."""

    operand: Lie
    batch: Lie
    lie: Lie


def prepare(kernel: Forward, call: AttentionCall, card: Card) -> Launch | Chain:
    """What starts attention, with copies of keys and values before it where that is faster."""
    copies = copies_of(kernel, call, card)
    if not copies:
        return kernel.prepare(call, card)
    operands = 4 + (call.lse is not None) + (0 if call.bounds is None else 4)
    inner, places = replace(call), list(range(operands))
    for room, (name, copy) in enumerate(copies.items(), operands):
        places["qkv".index(name)] = room
        setattr(inner, name, copy.lie)
    if _are_alike(copies):
        pair, to = (x._replace(shape=(2, *x.shape[1:])) for x in copies["k"][:2])
        steps = [Step(Rearrange.copying(pair, to, both=True), (1, 2, *places[1:3]))]
    else:
        named = [(n, copies[name]) for n, name in ((1, "k"), (2, "v")) if name in copies]
        steps = [Step(Rearrange.copying(copy.operand, copy.batch), (n, places[n])) for n, copy in named]
    steps.append(Step(kernel.prepare(inner, card), places))
    rooms = [((copy.lie.size,), copy.lie.dtype) for copy in copies.values()]
    # Without memory for the copies the operands are read as they lie, and the next call tries again.
    return Chain(steps, rooms, otherwise=lambda: kernel.prepare(call, card))


def copies_of(kernel: Forward, call: AttentionCall, card: Card) -> dict[str, Copy]:
    """The copies of "k" and "v" that a call makes."""
    if not isinstance(kernel, AttentionSm90) or kernel.fp8 or kernel.consumers != 2:
        return {}
    if max(kernel.head_dim, kernel.value_dim) not in _COLUMNS:
        return {}
    wanted = {"k": _copy(call.k, kernel.head_dim), "v": _copy(call.v, kernel.value_dim)}
    found = {name: copy for name, copy in wanted.items() if copy is not None}
    moved = sum(math.prod(x.shape) * x.itemsize for copy in found.values() for x in (copy.operand, copy.batch))
    costs = (1 if _are_alike(found) else len(found)) * _LAUNCH + moved / (_COPY_RATE * card.bandwidth)
    gains = len(found) * lines_read(call, kernel.tile_q) * _LATE_CYCLES / (card.multiprocessors * card.clock)
    return found if costs < gains and sum(copy.lie.nbytes for copy in found.values()) <= MOST_BYTES else {}


def _are_alike(copies: dict[str, Copy]) -> bool:
    """Whether one launch copies keys and values: as a matrix each, with the same lines."""
    found = [(copy.operand.shape, copy.operand.strides[1], copy.batch.shape) for copy in copies.values()]
    return len(found) == 2 and found[0] == found[1] and found[0][0][0] == 1


def lines_read(call: AttentionCall, tile_q: int) -> float:
    """How many keys all tiles of queries read; with sequences of different lengths, at least."""
    batches, heads, queries, _ = call.q.shape
    keys, share = call.k.shape[2], 1.0 if call.mask is None else share_of_blocks(call.mask)
    if call.bounds is not None:  # of all lengths with this sum, equal ones read the fewest
        batches = max(1, len(call.bounds[0]) - 1)
        queries, keys = queries // batches, keys // batches
    shift = keys - queries if call.bottom_right else 0
    row = np.arange(0, queries, tile_q)
    first = np.clip(row + shift - call.left, 0, keys)
    end = np.clip(np.minimum(row + tile_q, queries) + shift + call.right, 0, keys)
    return float(batches * heads * np.maximum(end - first, 0).sum() * share)


def _copy(x: Array, columns: int) -> Copy | None:
    """The copy of an operand, unless all its lines begin at whole sectors, or it is no batch of matrices."""
    if columns not in _COLUMNS or not any(x.strides[n] % _SECTOR for n in _axes(x)):
        return None
    return _lines(x, columns, _LINE)


def _axes(x: Array) -> list[int]:
    """The dimensions before the columns that have a stride, the largest first."""
    return sorted((n for n in range(3) if x.shape[n] > 1), key=lambda n: -x.strides[n])


def _lines(x: Array, columns: int, unit: int) -> Copy | None:
    """The copy of an operand with lines of so many columns at multiples of a unit; None for no batch of matrices."""
    axes = _axes(x)
    known = [(x.strides[n], x.shape[n]) for n in axes]
    for n in reversed(range(len(axes) - 1)):
        (outer, count), (inner, each) = known[n : n + 2]
        if outer == inner * each:
            known[n : n + 2] = [(inner, count * each)]
    if len(known) > 2 or any(stride < 0 for stride, _ in known):
        return None
    (batch, batches), (row, rows) = [(0, 1), (0, 1), *known][-2:]
    operand = Lie(x.dtype, (batches, rows, x.shape[3]), (batch, row, x.strides[3]), x.data.ptr % _LINE)
    pitch = -(-columns * x.itemsize // unit) * unit
    steps, step = [pitch] * 3, pitch
    for n in reversed(axes):
        steps[n] = step
        step *= x.shape[n]
    whole = Lie(x.dtype, (batches, rows, columns), (rows * pitch, pitch, x.itemsize))
    return Copy(operand, whole, Lie(x.dtype, (*x.shape[:3], columns), (*steps, x.itemsize)))


def readable(x: Array) -> Array:
    """The array, or a copy that TMA can read, whose lines begin at whole sectors."""
    if mappable(x):
        return x
    *shape, columns = x.shape
    unit = _SECTOR // x.itemsize
    axes = [*_axes(x), *(n for n in range(3) if shape[n] == 1)]
    room = cupy.empty((*(shape[n] for n in axes), -(-columns // unit) * unit), x.dtype)
    found = room.transpose(*(axes.index(n) for n in range(3)), 3)[..., :columns]
    copy = _lines(x, columns, _SECTOR) if x.strides[3] > 0 else None
    if copy is None:
        found[...] = x  # element by element
    else:
        Rearrange.copying(copy.operand, copy.batch).start((x, room))
    return found
