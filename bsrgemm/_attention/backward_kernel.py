"""What the kernels for the gradients of attention have in common: what decides them, and the tiles they walk over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cupy
import numpy as np

from .._backend.base import Array
from .._kernels.card import Card, tensor_arch
from .._kernels.jit import MAX_GRID_YZ
from .._kernels.kernel import Kernel
from .._kernels.launch import Chain, Launch, Map, Scratch
from .._kernels.structs import TENSOR_MAP_BYTES
from .._kernels.tensor_map import Layout
from .._kernels.workspace import StreamOrdered, kept_in
from ..dtypes import HALF_DTYPES
from . import arguments, mask_tiles
from .call import BackwardCall
from .forward import BOUNDS, CAPPED, DIMS, Places, address_writer, mask_fields, scores, section, strides_of, tiles_of

#: What a launch computes: dq, dk and dv, dk alone, dv alone; as cuda/common/attention_backward.cuh numbers them.
OF_QUERIES, OF_KEYS_AND_VALUES, OF_KEYS, OF_VALUES = range(4)
#: Tiles of keys that no kernel reaches: nothing is cut.
NOTHING_CUT = (2**31 - 1, 1)
#: At least so many heads are walked together in tiles of 128 keys that are claimed, even if they do not fit the L2.
_LEAST_SECTION = 2
#: Where `Backward` and `BackwardRows` are in an argument.
_WITHIN = {"Backward": ("", None), "BackwardRows": ("backward.", ""), "BackwardSm90": ("rows.backward.", "rows.")}
#: Neighbouring fields of `Backward` and of `BackwardRows` that are addresses of operands and of temporary memory.
_ADDRESSES = ("attention.q attention.k attention.v", "dout statistics dq dk dv")
_ADDRESSES_OF_ROWS = ("out lse dlse delta", "logarithms deltas sums turns", "partials")


@dataclass(frozen=True)
class BackwardProblem:
    """The properties of a problem that decide the kernel."""

    arch: str
    dtype: np.dtype[Any]
    dout_dtype: np.dtype[Any]
    acc: np.dtype[Any]
    head_dim: int
    value_dim: int
    #: SIGNED or CAPPED
    scores: int
    #: whether sums are made in one order
    ordered: bool = True
    #: query heads of all batches
    heads: int = 1
    #: whether a mask is sparse in blocks of 64 keys
    narrow: bool = False
    #: whether there is a softcap, and it is less than `LEAST_SOFTCAP`
    steep: bool = False

    @property
    def suits_tensor_cores(self) -> bool:
        """Whether the tensor cores of the card multiply these operands."""
        return (
            self.dtype in HALF_DTYPES
            and self.dout_dtype == self.dtype
            and all(0 < x <= DIMS[-1] for x in (self.head_dim, self.value_dim))
            and tensor_arch(self.arch)
        )

    @property
    def padded_dims(self) -> tuple[int, int]:
        """Columns of queries and keys, and of values, for which the tensor-core kernels are compiled."""
        head_dim, value_dim = (next(d for d in DIMS if d >= x) for x in (self.head_dim, self.value_dim))
        return head_dim, value_dim

    @property
    def has_few_heads(self) -> bool:
        """Whether a grid can have a row for each head, as that of BackwardBegin has."""
        return self.heads <= MAX_GRID_YZ


class Gradients(Kernel):
    """A kernel that walks over tiles of queries and keys."""

    element: str
    #: the type of the sums
    sum: str
    head_dim: int
    value_dim: Any
    scores: int
    #: what it computes, such as OF_QUERIES
    role: int
    tile_q: Any
    tile_k: Any
    #: CTAs that run on a multiprocessor at the same time
    ctas: Any
    #: whether the sums of dq are made in one order
    ordered: bool
    #: whether CTAs stay and claim tiles
    claims: ClassVar[bool] = False
    #: whether the last tile of keys of a sequence comes first
    last_first: ClassVar[bool] = False
    #: whether operands are read in rows of multiples of 16 bytes
    reads_rows: ClassVar[bool] = True

    @property
    def acc(self) -> str:
        return self.sum

    @property
    def rare(self) -> bool:
        return self.head_dim != self.value_dim or self.scores == CAPPED

    def parts(self) -> tuple[Gradients, ...]:
        """The kernels that walk over tiles, of which this is the first one, in the order of their launches."""
        raise NotImplementedError(f"{type(self).__name__} is started by another kernel")

    def prepare(self, call: BackwardCall, card: Card) -> Chain:
        """All launches that write dq, dk and dv for a kind of call.

        Their operands are those of the call and, for sequences of different lengths, the bounds and what `sequences`
        returns for each of `parts`.
        """
        raise NotImplementedError(f"{type(self).__name__} is started by another kernel")

    def grid(self, lists: Lists, card: Card) -> tuple[int, ...]:
        """The CTAs of a launch."""
        raise NotImplementedError(type(self).__name__)

    def layouts(self, call: BackwardCall) -> tuple[Layout, ...]:
        """The tensor maps of q, k, v and dout; nothing for kernels that take none."""
        return ()

    def section(self, call: BackwardCall, all_heads: int) -> int:
        """Heads whose tiles are walked together, of all whose tiles this kernel has."""
        (_, heads, queries, _), (_, kv_heads, keys, _) = call.q.shape, call.k.shape
        group, width = heads // kv_heads, (call.q.shape[3] + call.v.shape[3]) * call.q.itemsize
        if self.role == OF_QUERIES:
            return section(all_heads, group, keys, width)
        found = section(all_heads, 1, queries * group, width)
        return min(all_heads, max(_LEAST_SECTION if self.tile_k == 128 else 1, found)) if self.claims else found

    def cut(self, call: BackwardCall, lists: Lists, card: Card) -> tuple[int, int]:
        """From which tile of keys on tiles are cut, and into how many shares."""
        return NOTHING_CUT

    def tiled(self, call: BackwardCall, together: int, card: Card) -> StreamOrdered:
        """The lists of the mask by tiles of queries or of keys, computed once and cached on the mask.

        The tiles of so many heads are walked `together`.
        """
        mask, shape = call.mask, (self.tile_q, self.tile_k)
        assert mask is not None
        if self.role == OF_QUERIES:
            return tiles_of(mask, *shape)
        kept, key = mask.__dict__.setdefault("_tiles", {}), (*shape, "by keys", 0)
        return kept_in(kept, key, lambda: mask_tiles.by_keys(mask._backend, mask, *shape))

    def sequences(self, call: BackwardCall) -> tuple[Array, Array]:
        """The tiles of sequences of different lengths, those with most keys or most queries first."""
        assert call.bounds is not None
        (q_bounds, k_bounds), keys = call.bounds, call.k.shape[2]
        if self.role == OF_QUERIES:
            return mask_tiles.sequences(cupy, q_bounds, k_bounds, call.q.shape[2], self.tile_q, call.right < keys)
        return mask_tiles.sequences_by_keys(cupy, k_bounds, q_bounds, keys, self.tile_k, self.last_first)

    def template(self, call: BackwardCall, lists: Lists) -> bytearray:
        """The argument `Backward` without the addresses of operands."""
        q, k, v = call.q, call.k, call.v
        batches, heads, queries, head_dim = q.shape
        _, kv_heads, keys, value_dim = v.shape
        _, factor, cap = scores(call.scale, call.softcap)
        attention = arguments.attention(self.acc).pack(
            q=0, k=0, v=0, o=0, lse=0, q_strides=strides_of(q), k_strides=strides_of(k), v_strides=strides_of(v),
            o_strides=bytes(arguments.STRIDES.size), q_scale=0, k_scale=0, v_scale=0, scale=factor, cap=cap,
            value_scale=1.0, batches=batches, heads=heads, group=heads // kv_heads, queries=queries, keys=keys,
            head_dim=head_dim, value_dim=value_dim, left=call.left, right=call.right, bottom_right=call.bottom_right,
            **lists.fields,
        )  # fmt: skip
        return arguments.backward(self.acc).pack(
            attention=attention, dout=0, statistics=0, dq=0, dk=0, dv=0, dout_strides=strides_of(call.dout),
            dq_strides=strides_of(call.dq), dk_strides=strides_of(call.dk), dv_strides=strides_of(call.dv),
            factor=call.scale,
            inverse_cap=0.0 if call.softcap is None else min(1 / cap, 1e38),  # more does not fit into float32
        )  # fmt: skip

    def launch(
        self, call: BackwardCall, template: bytearray, grid: tuple[int, ...], places: Places, lists: Lists, holds: Any
    ) -> Launch:
        """The launch of this kernel, whose argument has `template` in it; `places` are those of operands by name."""
        (outer,) = self.structs
        layouts = self.layouts(call)
        if layouts:
            template = outer.pack(**dict.fromkeys(("q", "k", "v", "dout"), bytes(TENSOR_MAP_BYTES)), rows=template)
        inner, of_rows = _WITHIN[outer.name]
        groups = [(inner, group) for group in _ADDRESSES]
        groups += [(f"{inner}attention.", " ".join(BOUNDS))] if call.bounds is not None else []
        groups += [(of_rows, group) for group in _ADDRESSES_OF_ROWS] if of_rows is not None else []
        counters = outer.patch(f"{inner}attention.counters").write
        return Launch(
            self,
            grid,
            template,
            pointers=address_writer(outer, [[at + name for name in group.split()] for at, group in groups], places),
            maps=[Map(operand, operand * TENSOR_MAP_BYTES, layout) for operand, layout in enumerate(layouts)],
            # One of the counters for each tile of keys that is cut.
            scratch=Scratch(0, 2 + lists.cut, lambda to, memory, zeros: counters(to, zeros)) if self.claims else None,
            holds=holds,
        )


class Lists:
    """The tiles that a kernel walks over: their number, and the fields of the argument that describe them."""

    def __init__(self, call: BackwardCall, kernel: Gradients, card: Card) -> None:
        mask, bounds = call.mask, call.bounds
        by_queries = kernel.role == OF_QUERIES
        batches, heads, queries, _ = call.q.shape
        kv_heads, keys = call.k.shape[1:3]
        own = heads if by_queries else kv_heads
        self.heads = own if bounds is not None else batches * own
        length, tile = (queries, kernel.tile_q) if by_queries else (keys, kernel.tile_k)
        self.tiles = -(-length // tile)
        names = ("q_bounds", "k_bounds", "sequences", "sequence_count", "order", "counters")
        self.fields: dict[str, int] = dict.fromkeys((*names, *arguments.MASK_POINTERS, *arguments.MASK_SIZES), 0)
        section = kernel.section(call, self.heads)
        #: what the fields point to
        self.held: Any = None
        if mask is not None:
            found = kernel.tiled(call, section, card).get()
            self.held = (found, mask.bits)
            pointers, order, sizes = mask_fields(found, mask, heads)
            self.fields |= dict(zip(arguments.MASK_POINTERS, pointers, strict=True))
            self.fields |= dict(zip(arguments.MASK_SIZES, sizes, strict=True))
            # In one order, tiles of keys are claimed one after the other.
            self.fields["order"] = 0 if kernel.ordered else order
        elif bounds is not None:
            self.fields["sequence_count"] = len(bounds[0]) - 1
            self.tiles = mask_tiles.most_tiles(length, self.fields["sequence_count"], tile)
        #: tiles of keys from number `whole` of the walk on are cut into `shares`: so many
        self.whole, self.shares = kernel.cut(call, self, card)
        self.cut = max(0, self.tiles * self.heads - self.whole)
        backwards = call.right < keys if by_queries else kernel.ordered
        self.fields |= {"tiles": self.tiles, "section": section, "backwards": backwards}


def places_of(call: BackwardCall, parts: tuple[Gradients, ...]) -> tuple[int, list[Places]]:
    """How many operands the launches of a call have, and for each of the parts which of them is where.

    They are those of the call and, for sequences of different lengths, the bounds and the tiles of each part.
    """
    names = [*call.operands, *(BOUNDS[:2] if call.bounds is not None else ())]
    places = {name: (n, 0) for n, name in enumerate(names)}
    if call.bounds is None:
        return len(names), [places] * len(parts)
    tiles = range(len(names), len(names) + 2 * len(parts), 2)
    return tiles.stop, [places | {"sequences": (n, 0), "order": (n + 1, 0)} for n in tiles]
