"""What the kernels of attention have in common: their argument, tensor maps, the lists of a mask, and launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._backend.base import Array
from .._kernels import tensor_map
from .._kernels.card import Card
from .._kernels.kernel import Kernel
from .._kernels.launch import Launch, Map, Scratch
from .._kernels.structs import TENSOR_MAP_BYTES, Struct
from .._kernels.tensor_map import Layout
from .._kernels.workspace import StreamOrdered, kept_in
from . import arguments, mask_tiles
from .call import AttentionCall
from .mask import BlockMask

#: Head sizes for which the tensor core kernels are compiled; a smaller head is padded with zeros.
DIMS = (64, 80, 96, 128, 192, 256)
#: How scores are computed: scale > 0, any scale, softcap. The values are those of cuda/common/attention.cuh.
PLAIN, SIGNED, CAPPED = range(3)
#: Bytes of K and V of the heads whose tiles are computed together, so that they stay in the L2.
_SECTION_BYTES = 16 << 20
_LOG2_E = math.log2(math.e)
_MOST_STRIDE = 2**40

#: The operands that every call has, and groups of neighbouring fields of the argument that differ between launches.
_OPERANDS = ("q", "k", "v", "o")
BOUNDS = ("q_bounds", "k_bounds", "sequences", "order")
_SCALES = ("q_scale", "k_scale", "v_scale")
_FACTORS = ("scale", "cap", "value_scale")
#: A field of an argument -> which operand it is the address of, and how many bytes further.
Places = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Problem:
    """The properties of a problem that decide the kernel."""

    arch: str
    dtype: np.dtype[Any]
    out_dtype: np.dtype[Any]
    acc: np.dtype[Any]
    head_dim: int
    value_dim: int
    scores: int
    #: whether TMA can read q, k and v, and write the result
    reads: bool
    writes: bool
    #: batches times heads times queries, and keys
    rows: int
    keys: int
    #: a mask of small blocks of which few are stored
    fine: bool = False
    #: keys of the pieces of which a mask has tiles gathered; 0: tiles have keys side by side
    piece: int = 0
    #: operands are bytes of fp8
    fp8: bool = False
    #: queries of a head
    queries: int = 0
    #: rows of queries that read the same keys, if a decode can compute them
    few: int = 0
    #: there is no mask, and all sequences have the same length
    alike: bool = False
    #: beside that there is no band: every query sees every key
    full: bool = False


class Forward(Kernel):
    """A kernel of attention, whose argument is an `Attention` or has one in it."""

    tile_q: Any
    tile_k: Any
    #: CTAs that run on a multiprocessor at the same time
    ctas: Any
    #: whether each tile has a CTA of its own; CTAs of other kernels stay and claim tiles
    cta_for_each_tile: Any = False
    #: whether it reads a copy of v in fp8, by columns
    fp8: Any = False

    @property
    def entry_keys(self) -> int:
        """Keys of an entry of a mask's lists."""
        return int(self.tile_k)

    def grid(self, call: AttentionCall, tiles: int, card: Card) -> tuple[int, ...]:
        """CTAs for so many tiles of queries of each head."""
        heads = call.q.shape[1] * (1 if call.bounds is not None else call.q.shape[0])
        most = 2**31 - 1 if self.cta_for_each_tile else card.multiprocessors * self.ctas
        return (min(tiles * heads, most),)

    def layouts(self, call: AttentionCall) -> tuple[Layout | None, ...]:
        """The tensor maps of q, k, v and the result; nothing for kernels that take none."""
        return ()

    def prepare(self, call: AttentionCall, card: Card) -> Launch:
        """The launch for a kind of call. Its operands are q, k, v, the result and, as far as there are any, the
        logarithms, the bounds with the tiles of sequences, the scales, and the copy of v.
        """
        q, k, v, mask, bounds = call.q, call.k, call.v, call.mask, call.bounds
        batches, heads, queries, head_dim = q.shape
        (_, kv_heads, keys, _), value_dim = k.shape, call.out.shape[3]  # copies of k and v may have more columns
        causal = call.right < keys
        tiles, sequence_count = -(-queries // self.tile_q), 0
        lists: StreamOrdered | None = None
        fields: dict[str, Any] = dict.fromkeys((*_OPERANDS, "lse", *BOUNDS, *_SCALES, "counters"), 0)
        fields |= dict.fromkeys((*arguments.MASK_POINTERS, *arguments.MASK_SIZES), 0)
        if mask is not None:
            lists = tiles_of(mask, self.tile_q, self.entry_keys)
            pointers, fields["order"], sizes = mask_fields(lists.get(), mask, heads)
            fields |= dict(zip(arguments.MASK_POINTERS, pointers, strict=True))
            fields |= dict(zip(arguments.MASK_SIZES, sizes, strict=True))
        elif bounds is not None:
            sequence_count = len(bounds[0]) - 1
            tiles = mask_tiles.most_tiles(queries, sequence_count, self.tile_q)
        _, factor, cap = scores(call.scale, call.softcap, call.fp8)
        own_heads = heads if bounds is not None else batches * heads
        fields |= {
            **dict(zip(_FACTORS, (factor, cap, call.value_scale), strict=True)),
            **{f"{name}_strides": strides_of(x) for name, x in (("q", q), ("k", k), ("v", v), ("o", call.out))},
            "batches": batches,
            "heads": heads,
            "group": heads // kv_heads,
            "queries": queries,
            "keys": keys,
            "head_dim": head_dim,
            "value_dim": value_dim,
            "sequence_count": sequence_count,
            "left": call.left,
            "right": call.right,
            "bottom_right": call.bottom_right,
            "tiles": tiles,
            "section": section(own_heads, heads // kv_heads, keys, (head_dim + value_dim) * q.itemsize),
            "backwards": causal,
        }
        (outer,) = self.structs
        inner = "" if outer.name == "Attention" else "attention."
        packed = arguments.attention("f64" if call.acc == np.float64 else "f32").pack(**fields)
        if inner:
            packed = outer.pack(**dict.fromkeys(_OPERANDS, bytes(TENSOR_MAP_BYTES)), attention=packed)

        groups = [_OPERANDS, *[("lse",)] * (call.lse is not None), *[BOUNDS] * (bounds is not None)]
        groups += [(name,) for name, x in zip(_SCALES, call.scales, strict=True) if call.fp8 and x is not None]
        places = {name: (n, 0) for n, name in enumerate(name for group in groups for name in group)}
        write_counters = outer.patch(inner + "counters").write
        # The copy of v in fp8 is the last operand.
        maps = [(len(places) if n == 2 and self.fp8 else n, n, found) for n, found in enumerate(self.layouts(call))]
        return Launch(
            self,
            self.grid(call, tiles, card),
            packed,
            pointers=address_writer(outer, [[inner + name for name in group] for group in groups], places),
            numbers=outer.patch(*(inner + name for name in _FACTORS)).write if call.fp8 else None,
            maps=[Map(operand, n * TENSOR_MAP_BYTES, found) for operand, n, found in maps if found is not None],
            scratch=Scratch(0, 2, lambda to, memory, zeros: write_counters(to, zeros)),
            holds=None if mask is None or lists is None else (lists.value, mask.bits),
        )


def address_writer(outer: Struct, groups: Iterable[Sequence[str]], places: Places) -> Callable[..., None]:
    """What writes the addresses of operands into an argument.

    A group has neighbouring fields, named as `Struct.patch` does. A field without a place becomes 0.
    """
    writers = [
        (outer.patch(*names).write, [places.get(name.rpartition(".")[2], (-1, 0)) for name in names])
        for names in groups
    ]

    def write(to: Any, *addresses: int) -> None:
        known = (*addresses, 0)
        for writer, found in writers:
            writer(to, *[known[operand] + further for operand, further in found])

    return write


def strides_of(x: Array) -> bytearray:
    batch, head, row, column = (step // x.itemsize for step in x.strides)
    return arguments.STRIDES.pack(batch=batch, head=head, row=row, column=column)


def mappable(x: Array) -> bool:
    """Whether TMA can read or write this array of four dimensions."""
    steps = [step for step, n in zip(x.strides[:3], x.shape[:3], strict=True) if n > 1]
    contiguous = x.shape[3] == 1 or x.strides[3] == x.itemsize
    return x.data.ptr % 16 == 0 and contiguous and all(0 < s < _MOST_STRIDE and s % 16 == 0 for s in steps)


def layout_of(x: Array, rows: int, width: int = 128) -> Layout:
    """The tensor map of an array without its address: a copy takes `rows` rows of `width` bytes."""
    batches, heads, length, columns = x.shape
    # A dimension of one element is never stepped along, but its stride has to be a multiple of 16 bytes.
    steps = tuple(step if n > 1 else 16 for step, n in zip(x.strides[2::-1], (length, heads, batches), strict=True))
    sizes, box = (columns, length, heads, batches), (width // x.itemsize, rows, 1, 1)
    return Layout(tensor_map.dtype_name(x.dtype), sizes, steps, box, f"{width}B")


def section(heads: int, group: int, keys: int, width: int) -> int:
    """Heads whose tiles are computed together: as many as fit the L2 with their keys and values.

    >>> section(heads=16, group=1, keys=16384, width=2 * 256)
    2
    """
    return max(1, min(heads, _SECTION_BYTES * group // max(1, keys * width)))


def scores(scale: float, softcap: float | None, fp8: bool = False) -> tuple[int, float, float]:
    """How the scores are computed (PLAIN, SIGNED or CAPPED), and the two factors that the kernel needs for it."""
    if softcap is not None:
        return CAPPED, 2 * scale * _LOG2_E / softcap, softcap * _LOG2_E
    factor = scale * _LOG2_E
    if fp8:  # the kernel applies the factors of heads and clamps the product
        return (PLAIN if factor > 0 else SIGNED), factor, 0.0
    # The score of a hidden key is the lowest float: after scaling it must stay finite, and far below all other scores.
    return (PLAIN if 1e-30 < factor <= 1 else SIGNED), factor, 0.0


def has_large_shared(arch: str) -> bool:
    """Whether a CTA has 163 KB. Blackwell has, but the compiler runs out of registers for the larger tiles there."""
    return arch in ("sm_80", "sm_87", "sm_90", "sm_90a")


def pointer_of(x: Array | None) -> int:
    """The address of an array; 0 for none."""
    return 0 if x is None else x.data.ptr


def share_of_blocks(mask: BlockMask) -> float:
    """The blocks that a mask stores, of all blocks of its patterns."""
    rows, cols = (-(-n // b) for n, b in zip(mask.shape, mask.block, strict=True))
    return len(mask.indices) / max(1, rows * cols * mask.heads[0] * mask.heads[1])


def tiles_of(mask: BlockMask, tile_q: int, tile_k: int) -> StreamOrdered:
    """The lists of the mask by tiles, computed once and kept with the mask."""
    kept, shape = mask.__dict__.setdefault("_tiles", {}), (tile_q, tile_k)
    return kept_in(kept, shape, lambda: mask_tiles.tiles(mask._backend, mask, *shape))


def mask_fields(found: Any, mask: BlockMask, heads: int) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """The fields of a mask for `heads` query heads: addresses of its lists, that of the order of tiles, and sizes."""
    arrays = (found.first, found.columns, found.parts, found.kinds, mask.bits)
    B, H = mask.heads
    shared = (H, int(B > 1), 0 if H == 1 else heads // H)
    sizes = (len(found.columns), len(mask.bits), *mask.block, found.parts_q, found.parts_k, mask.bits.shape[2])
    return tuple(map(pointer_of, arrays)), found.order.data.ptr, (*sizes, *shared)
