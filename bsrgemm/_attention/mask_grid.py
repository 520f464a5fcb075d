"""The grid of blocks of a mask: checks of the lengths, the sides of a block and the device."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._backend import registry
from .._backend.base import Array

_LEAST_BLOCK, _MOST_BLOCK = 16, 256
_ALIGNMENTS = ("bottom-right", "top-left")
#: Stored blocks, and the blocks along a side, are counted in 32 bits.
_MOST_STORED = 2**31 - 1
#: More queries or keys than any memory has lists for.
_TOO_LONG = 2**48


class Grid:
    """Checked lengths, block and backend of a mask."""

    def __init__(self, queries: Any, keys: Any, block: Any, device: str | None) -> None:
        keys = queries if keys is None else keys
        self.shape = (_check_length("queries", queries), _check_length("keys", keys))
        sides = (block, block) if isinstance(block, int | np.integer) else _pair(block)
        if sides is None or not all(isinstance(b, int | np.integer) for b in sides):
            raise ValueError(f"block: wanted one or two integers, got {block!r}")
        if not all(_LEAST_BLOCK <= b <= _MOST_BLOCK and b % _LEAST_BLOCK == 0 for b in sides):
            raise ValueError(f"block: wanted multiples of {_LEAST_BLOCK} up to {_MOST_BLOCK}, got {block!r}")
        self.block = (int(sides[0]), int(sides[1]))
        self.backend = registry.by_name(registry.default_device() if device is None else device)
        self.counts = (-(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1]))
        for name, count, side in zip(("queries", "keys"), self.counts, self.block, strict=True):
            if count > _MOST_STORED:
                raise ValueError(
                    f"{name}: {count} blocks of {side} along a side, wanted less than 2**31; take a larger block"
                )

    def offset(self, align: str) -> int:
        """The position of the first query among the keys."""
        if not isinstance(align, str) or align not in _ALIGNMENTS:
            raise ValueError(f"align: wanted 'bottom-right' or 'top-left', got {align!r}")
        return self.shape[1] - self.shape[0] if align == "bottom-right" else 0

    def sizes(self, row: Array, col: Array) -> Array:
        """Number of elements of each block that lie within the lengths."""
        xp, (S_q, S_k), (bq, bk) = self.backend.xp, self.shape, self.block
        rows = self.counts[0]
        height = xp.minimum(bq, S_q - row % max(1, rows) * bq)
        return height * xp.minimum(bk, S_k - col.astype(np.int64) * bk)


def check_count(name: str, n: Any, least: int = 0) -> int:
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < least:
        raise ValueError(f"{name}: wanted an integer from {least} on, got {n!r}")
    return int(n)


def _check_length(name: str, n: Any) -> int:
    if check_count(name, n) >= _TOO_LONG:
        raise ValueError(f"{name}: wanted less than 2**48, got {n}")
    return int(n)


def check_heads(heads: Any) -> tuple[int, int]:
    sides = _pair(heads)
    if sides is None:
        raise ValueError(f"heads: wanted two integers, the numbers of batches and heads, got {heads!r}")
    return check_count("heads", sides[0], 1), check_count("heads", sides[1], 1)


def check_shape(shape: Any) -> tuple[int, int]:
    """The numbers of queries and keys."""
    sides = _pair(shape)
    if sides is None:
        raise ValueError(f"shape: wanted two integers, the numbers of queries and keys, got {shape!r}")
    return _check_length("shape", sides[0]), _check_length("shape", sides[1])


def check_stored(count: int, block: tuple[int, int]) -> None:
    """ValueError if there are more stored blocks than `indptr` can count."""
    if count > _MOST_STORED:
        raise ValueError(
            f"block: {count} blocks of {block[0]} x {block[1]} would be stored, wanted less than 2**31; "
            "take a larger block"
        )


def _pair(sides: Any) -> tuple[Any, Any] | None:
    """The two elements of a sequence; None if `sides` is anything else."""
    try:
        first, second = sides
    except (TypeError, ValueError):
        return None
    return first, second
