"""The engine that appends tokens to a cache on the CPU: one sequence after the other."""

from __future__ import annotations

import numpy as np

from .append import AppendCall, AppendEngine


class HostAppend(AppendEngine):
    """Appends to caches in memory of NumPy."""

    def append(self, call: AppendCall) -> None:
        n = call.k.shape[2]
        if call.table is not None and call.new_table is not None:
            call.table[...] = call.new_table
        for b, first in enumerate(call.lengths.tolist()):
            takes = n if call.takes is None else min(max(int(call.takes[b]), 0), n)
            numbers, places = _targets(call, b, np.arange(first, first + takes))
            if first < 0 or first + takes > call.capacity or not _exist(numbers, len(call.to_k)):
                call.refused[b] += takes
                continue
            for x, to in ((call.k, call.to_k), (call.v, call.to_v)):
                if call.table is None:
                    to[b, :, first : first + takes] = x[b, :, :takes]
                else:
                    to[numbers, :, places] = x[b, :, :takes].swapaxes(0, 1)
            call.lengths[b] += takes


def _targets(call: AppendCall, b: int, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the page of each of some tokens of a sequence, -1 if it has none, and the position in the page."""
    if call.table is None:
        return np.full(len(tokens), b), tokens
    page = call.to_k.shape[2]
    width = call.table.shape[1]
    numbers = np.full(len(tokens), -1)
    inside = (tokens >= 0) & (tokens < width * page)
    numbers[inside] = call.table[b, tokens[inside] // page]
    return numbers, tokens % page


def _exist(pages: np.ndarray, count: int) -> bool:
    return bool(((pages >= 0) & (pages < count)).all())


ENGINE = HostAppend()
