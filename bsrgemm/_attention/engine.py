"""The interface of an engine of attention, and the table of engines by backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from .._backend.base import Array, Backend, EngineTable
from .call import AttentionCall, BackwardCall, DecodeCall
from .kv_cache import KVCache
from .mask import BlockMask


class AttentionEngine(ABC):
    """Attention on the arrays of one backend."""

    #: What is known of decodes that were checked (`Calls`, by `decode_key`): they are not checked again.
    decodes: Any = None

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @abstractmethod
    def forward(self, call: AttentionCall) -> Any:
        """Write the result of an attention, and the logarithms of its sums if they are wanted.

        Returns what starts calls of the same kind again (`Launch`), or None if that is not possible.
        """

    def known(self, mask: BlockMask | None, key: Any) -> Any:
        """Return what is known of a kind of call with a mask, or without one; None where nothing is remembered."""
        return None

    def remember(self, mask: BlockMask | None, key: Any, known: Any) -> None:
        """Keep what is known of a kind of call for the next one, where anything is remembered."""
        return None

    @abstractmethod
    def backward(self, call: BackwardCall) -> Any:
        """Write the gradients of an attention; return what starts calls of the same kind again, as `forward` does."""

    def decode_key(self, q: Array, cache: KVCache, out: Array | None, window: Any, options: tuple[Any, ...]) -> Any:
        """Return the key of a call in `decodes`; None if it has to be checked.

        The options are scale, softcap, layout and return_lse.
        """
        return None

    @abstractmethod
    def decode(self, call: DecodeCall) -> Any:
        """Write the result of a decode, and the logarithms of its sums if they are wanted; return its launch."""


ENGINES: EngineTable[AttentionEngine] = EngineTable(__package__, cpu="host", cuda="cuda")
