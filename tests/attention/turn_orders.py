"""The order that cuda/turn_order.cu finds, in plain Python."""

from __future__ import annotations

import numpy as np

#: Of the kernel: quarters of a turn, of an addition after it, and before the first turn of a tile of keys.
TURN, ADDITION, BEGIN = 4, 4, 2


def turns_of(first: np.ndarray, columns: np.ndarray, tiles: int, rows: int, walkers: int) -> np.ndarray:
    """Return the numbers of the entries of all patterns, in the order in which they pass by their tile of keys."""
    order = np.arange(len(columns))
    for pattern in range((len(first) - 1) // tiles):
        bounds = first[pattern * tiles : (pattern + 1) * tiles + 1].astype(np.int64)
        whole = int(bounds[-1] - bounds[0]) * TURN
        starts = [whole * i // (tiles * walkers) for i in range(walkers)]
        ends = np.zeros(rows, np.int64)
        for place in range(tiles):
            tile, walker = tiles - 1 - place, place % walkers
            entries = range(bounds[tile], bounds[tile + 1])
            sorted_ = sorted(entries, key=lambda e: (ends[columns[e]], e))
            now = starts[walker] + BEGIN
            for e in sorted_:
                now = max(now + TURN, int(ends[columns[e]]))
                ends[columns[e]] = now + ADDITION
            if sorted_:
                starts[walker] = now
            order[bounds[tile] : bounds[tile + 1]] = sorted_
    return order
