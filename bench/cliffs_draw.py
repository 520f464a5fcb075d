"""Which cells `cliffs` measures: each is drawn from a seed and its number alone, the same on every machine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from .cases.attention import Attention, Decode, Gradients
from .cases.case import Case
from .cliffs_cells import (
    ORDERS,
    PATTERNS,
    SIDES,
    AttentionCell,
    Cell,
    ProductCell,
    SampledCell,
    SparseCell,
    up,
)

KINDS = ("float16", "bfloat16", "float32", "tf32", "float64", "complex64", "complex128", "int8", "e4m3")
_POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
#: Multiples of 4, 8 and 16 between the powers of two, then primes and neighbours of powers
_BLOCKS = (
    *_POWERS,
    12,
    20,
    24,
    40,
    48,
    72,
    80,
    96,
    100,
    112,
    120,
    144,
    160,
    192,
    3,
    5,
    6,
    7,
    9,
    13,
    17,
    31,
    33,
    50,
    127,
)
_COLUMNS = (*_POWERS, 512, 1024, 2048, 4096, 12, 24, 48, 96, 100, 192, 500, 1000, 4000,
            3, 5, 7, 9, 15, 17, 31, 33, 63, 65, 127, 129, 255, 257, 513, 1025, 2049)  # fmt: skip
_SIZES = (512, 1000, 1024, 2000, 2048, 4096, 6000, 8192)
_DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
_LENGTHS = (100, 128, 200, 500, 512, 1000, 1024, 1500, 2048, 3000, 4096, 8192, 16384)
_HEAD_DIMS = (32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256)
#: Operations a second that bound sizes: of the fastest units, and of the plain cores, which small and odd blocks get
_FAST = {"float16": 4e14, "bfloat16": 4e14, "e4m3": 4e14, "tf32": 2e14, "float32": 3e13, "float64": 3e13}
_SLOW = 4e12
#: Seconds, bytes and blocks that there may be, on a card and on a CPU, and the longest side or sequence on a CPU
_SECONDS, _BYTES, _GRID = 5e-3, 4e9, 1 << 25
_CPU_SECONDS, _CPU_SIDE = 1e-6, 96
#: Seconds that the smallest attention takes on an H200 (gradients: three kernels)
_LAUNCH = 8e-6


def _bounded(part: str, cell: Any, cpu: bool) -> Cell:
    """The cell beside its friend; of half the size, again and again, if one of them is too large."""
    while True:
        grid = math.prod(cell.shape) / math.prod(cell.block)
        plain = any(side % 16 for side in cell.block) or cell.kind not in _FAST
        full = cell.flops / cell.expected
        seconds = max(full / _FAST.get(cell.kind, 8e12), cell.flops / (_SLOW if plain else _FAST[cell.kind]))
        large = max(cell.shape) > _CPU_SIDE or seconds > _CPU_SECONDS if cpu else seconds > _SECONDS
        found = Cell(part, cell, cell.friend())
        if max(cell.shape) <= 2 * max(cell.block) or not (large or grid > _GRID or found.memory > _BYTES):
            return found
        cell = replace(cell, shape=tuple(up(n // 2, b) for n, b in zip(cell.shape, cell.block, strict=True)))


def _blocks(rng: Random, kinds: Sequence[str]) -> dict[str, Any]:
    """The fields of `OfBlocks`: squares mostly."""
    block = rng.choice(_BLOCKS)
    blocks = (block, block) if rng.random() < 0.75 else (block, rng.choice(_BLOCKS))
    sizes = [rng.choice(_SIZES)] * 2 if rng.random() < 0.7 else rng.choices(_SIZES, k=2)
    shape = tuple(max(b, n // b * b) for n, b in zip(sizes, blocks, strict=True))
    pattern = "uniform" if rng.random() < 0.5 else rng.choice(PATTERNS)
    density = rng.choice(_DENSITIES)
    return {"kind": rng.choice(kinds), "block": blocks, "shape": shape, "density": density, "pattern": pattern}


def _order(rng: Random) -> str:
    return "C" if rng.random() < 0.5 else rng.choice(ORDERS)


def product(rng: Random, cpu: bool) -> Cell:
    columns = rng.choice(_COLUMNS)
    side = "A @ B" if rng.random() < 0.5 else rng.choice(SIDES)
    cell = ProductCell(**_blocks(rng, KINDS), columns=columns, side=side, orders=(_order(rng), _order(rng)))
    return _bounded("products", replace(cell, columns=min(columns, 33)) if cpu else cell, cpu)


def sampled(rng: Random, cpu: bool) -> Cell:
    inner = rng.choice(_COLUMNS)
    cell = SampledCell(**_blocks(rng, KINDS[:7]), inner=inner, orders=(_order(rng), _order(rng)))
    return _bounded("sddmm", replace(cell, inner=min(inner, 33)) if cpu else cell, cpu)


def sparse(rng: Random, cpu: bool) -> Cell:
    kinds = [kind for kind in KINDS[:7] if kind != "tf32"]
    return _bounded("sparse", SparseCell(**_blocks(rng, kinds)), cpu)


def attention(rng: Random, cpu: bool) -> Cell:
    """Forward and backward."""
    kv_heads, group = rng.choice((1, 2, 4, 8)), rng.choice((1, 1, 2, 4, 8))
    length, size = rng.choice(_LENGTHS), rng.choice((16, 32, 48, 64, 96, 128, 256))
    kind = rng.choice(("float16", "float16", "bfloat16", "e4m3", "float32", "float64"))
    queries = rng.randint(1, 64) if rng.random() < 0.3 else None
    masked, share = rng.random() < 0.4, rng.choice(_DENSITIES)
    backward = queries is None and kind != "e4m3" and rng.random() < 0.5
    batch, head_dim, causal = rng.choice((1, 2, 4)), rng.choice(_HEAD_DIMS), not masked and rng.random() < 0.5
    stored = rng.choice(("bhsd", "bshd"))
    if cpu:
        batch, kv_heads, group = 1, min(kv_heads, 2), min(group, 2)

    def of_length(length: int) -> AttentionCell:
        blocks = (size, max(1, round(share * -(-length // size)))) if masked else None
        return AttentionCell(
            batch, kv_heads * group, length, head_dim, causal, blocks=blocks, kv_heads=kv_heads if group > 1 else None,
            kind=kind, queries=queries and min(queries, length), stored=stored,
        )  # fmt: skip

    rate = _SLOW if kind in ("float32", "float64") else _FAST["float16"] / (2.5 if backward else 1)
    while True:
        cell = of_length(length)
        large = length > _CPU_SIDE if cpu else cell.flops > rate * _SECONDS or 2 * cell.memory > _BYTES
        if length <= 64 or not large:
            break
        length //= 2
    wrapped: Callable[[Attention], Case] = Gradients if backward else lambda of: of
    return Cell("attention", wrapped(cell), wrapped(cell.friend()), 3 * _LAUNCH if backward else _LAUNCH)


def decode(rng: Random, cpu: bool) -> Cell:
    page, group = rng.choice((None, 16, 64, 128)), rng.choice((1, 2, 4, 8))
    block = page or rng.choice((16, 32, 64, 128))
    heads, length = rng.choice((1, 2, 4, 8)), rng.choice(_LENGTHS)
    cell = Decode(
        batch=2 if cpu else rng.choice((1, 4, 16, 64)), length=min(length, _CPU_SIDE) if cpu else length,
        heads=heads * group, kv_heads=heads, head_dim=rng.choice((64, 80, 96, 128, 192, 256)), page=page,
        kind=rng.choice(("float16", "bfloat16")), share=rng.choice((None, None, 0.1, 0.25)), block=block,
        back_to_back=False,
    )  # fmt: skip
    while cell.memory > _BYTES:
        cell = replace(cell, batch=cell.batch // 2)
    if cell.share:
        cell = replace(cell, length=up(cell.length, block))
    head_dim = next(d for d in (64, 128, 256) if d >= cell.head_dim)
    # With chosen blocks: a cache of as many keys as they have.
    read = cell.kept * block if cell.share else cell.length
    friend = replace(cell, length=up(read, 128), head_dim=head_dim, page=None, share=None)
    return Cell("decode", cell, friend, _LAUNCH)


#: Parts of the surface, with the share of the cells that each gets and what draws one: (random numbers, for a CPU)
PARTS: dict[str, tuple[int, Callable[[Random, bool], Cell]]] = {
    "products": (50, product), "sddmm": (12, sampled), "sparse": (10, sparse), "attention": (18, attention),
    "decode": (10, decode),
}  # fmt: skip


def draw(seed: int, count: int, parts: Sequence[str], cpu: bool = False) -> list[Cell]:
    """The first `count` cells of some parts."""
    found = []
    for number in range(count):
        rng = Random(f"{seed} {number}")
        (part,) = rng.choices(parts, [PARTS[part][0] for part in parts])
        found.append(PARTS[part][1](rng, cpu))
    return found


#: Blocks of the ordinary products, and how the operands and the matrix lie: (side, orders)
_ORDINARY = (128, 64, 32, 16, 24, 8, 40, 12, 20, 50, 100, 256, 6, 3, 36, 33, 72, 120)
_LAID = (("A @ B", ("C", "C")), ("A @ B", ("F", "C")), ("A.T @ B", ("C", "C")), ("B @ A", ("C", "C")))


def ordinary() -> list[Cell]:
    """432 products that users come with: n = 4096, density .1, three dtypes, 18 blocks, 64 and 1024 columns, four ways.

    >>> len(ordinary())
    432
    """
    found = []
    for kind, block, columns in itertools.product(("float16", "float32", "float64"), _ORDINARY, (64, 1024)):
        shape = (4096 // block * block,) * 2
        for side, orders in _LAID:
            cell = ProductCell(
                kind=kind, block=(block, block), shape=shape, density=0.1, columns=columns, side=side, orders=orders
            )
            found.append(Cell("products", cell, cell))
    return found
