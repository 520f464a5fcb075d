"""Adding tokens to the sequences of a cache: the checked arguments, the interface of engines, and their table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from .._backend.base import Array, EngineTable


@dataclass(slots=True)
class AppendCall:
    """Checked arguments of `KVCache.append`; `k` and `v` are (batch, heads, tokens, columns) of any strides."""

    k: Array
    v: Array
    #: memory of the cache, (pages, heads, tokens of a page, columns)
    to_k: Array
    to_v: Array
    #: tokens that each sequence has, and tokens for which it had no room; int32 on the cache's device
    lengths: Array
    refused: Array
    #: largest length of a sequence
    capacity: int
    #: pages of each sequence, and what the table becomes before the tokens are written; None if the cache is not paged,
    #: or if the table stays as it is
    table: Array | None = None
    new_table: Array | None = None
    #: how many of the tokens each sequence takes, int32 on the cache's device; None: all
    takes: Array | None = None


class AppendEngine(ABC):
    """Appends tokens to the sequences of a cache on the arrays of one backend."""

    def is_capturing(self) -> bool:
        """Tell whether work becomes a part of a graph that is replayed later, instead of being done now."""
        return False

    @abstractmethod
    def append(self, call: AppendCall) -> None:
        """Write tokens at the ends of the sequences, whose lengths on the device grow by them.

        A sequence without room for all of its tokens takes none of them. They are added to `refused`.
        """


APPEND_ENGINES: EngineTable[AppendEngine] = EngineTable(__package__, cpu="append_host", cuda="append_launch")
