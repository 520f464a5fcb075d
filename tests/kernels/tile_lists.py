"""The tiles that cuda/sampled_tiles.cu lists, found in plain Python: the same tiles, in the order of windows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bsrgemm._products.lists import SampledTiles

#: kWays, kLevels and kBits of the kernel
_WAYS, _LEVELS, _BITS = 63, 12, 6
_TWO = (3, 5, 9, 17, 33, 6, 10, 18, 34, 12, 20, 36, 24, 40, 48)
_THREE = (7, 11, 19, 35, 13, 21, 37, 25, 41, 49, 14, 22, 38, 26, 42, 50, 28, 44, 52, 56)

Tile = tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, ...], ...]]


def groups(size: int, way: int) -> Iterator[list[int]]:
    """Yield the rows of each group of `size` rows of a window in one of the ways."""
    if size == 2:
        pivots, directions = 1 << ((way + 1).bit_length() - 1), [way + 1]
    else:
        pivots = _TWO[way % 15] if size == 4 else _THREE[way % 20]
        random, places = way * 0x9E3779B1 % 2**32, [bit for bit in range(_BITS) if pivots >> bit & 1]
        directions = [
            1 << place | (random >> (8 + _BITS * i)) % 2**_BITS & ~pivots for i, place in enumerate(places)
        ]  # fmt: skip
    for row in range(2**_BITS):
        if row & pivots:
            continue
        rows = [row]
        for direction in directions:
            rows += [x ^ direction for x in rows]
        yield rows


def tiles(config: SampledTiles, pattern: list[dict[int, int]]) -> list[Tile]:
    """Return block rows, block columns and blocks of all tiles; `pattern` has the block of each column of each row."""
    found: list[Tile] = []
    width = max((max(row) + 1 for row in pattern if row), default=0)
    for top in range(0, len(pattern), config.rows):
        for left in range(0, width, config.columns):
            inside = range(left, left + config.columns)
            window: Any = [{c: p for c, p in row.items() if c in inside} for row in pattern[top : top + config.rows]]
            window += [{} for _ in range(config.rows - len(window))]
            found += _tiles_of(config, window, top, len(pattern))
    return found


def _tiles_of(config: SampledTiles, window: list[dict[int, int]], top: int, height: int) -> Iterator[Tile]:
    full, least = config.group * config.wide, config.group * config.wide
    while True:
        last, best = least < config.wide, 0
        for way in range(1 if last else _WAYS):
            for rows in groups(config.group, way):
                while True:
                    numbers: dict[int, int] = {}
                    for row in rows:
                        for column in window[row]:
                            numbers[column] = numbers.get(column, 0) + 1
                    taken = sorted(sorted(numbers, key=lambda c: (-numbers[c], c))[: config.wide])
                    blocks = sum(numbers[c] for c in taken)
                    if blocks < (1 if last else least):
                        best = max(best, blocks)
                        break
                    yield (
                        tuple(top + row if top + row < height else -1 for row in rows),
                        (*taken, *[-1] * (config.wide - len(taken))),
                        tuple(
                            (*(window[row].pop(c, -1) for c in taken), *[-1] * (config.wide - len(taken)))
                            for row in rows
                        ),
                    )
        if last or not best:
            return
        least = min(least - max(1, (full - config.wide) // _LEVELS), best)
