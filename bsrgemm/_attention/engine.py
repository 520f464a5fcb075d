"""The interface of an engine of attention, and the table of engines by backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from .._backend.base import Array, Backend
from .._backend.engines import EngineTable
from .._kernels.movable import MovingLaunch
from .call import AttentionCall, BackwardCall, DecodeCall
from .kv_cache import KVCache


class Launch(Protocol):
    """An attention that can be started again with the same operands and options."""

    def start(self, operands: tuple[Array | None, ...]) -> bool:
        """Start it; False, and nothing is started, if the device or the choice of a kernel has changed.

        The operands are q, k, v, the result and the logarithms, at whose addresses it is.
        """

    def movable(self) -> MovingLaunch:
        """Return a launch for q, k, v, a result and logarithms at any aligned addresses, all else being equal."""


class AttentionEngine(ABC):
    """Attention on the arrays of one backend."""

    #: What is known of decodes that were checked (`Calls`, by `decode_key`): they are not checked again.
    decodes: Any = None

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def temporary(self, make: Callable[[], Array]) -> Array:
        """Return the array that `make` returns, whose memory lasts as long as the work that reads it needs it."""
        return make()

    @abstractmethod
    def forward(self, call: AttentionCall) -> Launch | None:
        """Write the result of an attention, and the logarithms of its sums if they are wanted.

        Returns what starts the same again, or None if that is not possible.
        """

    @abstractmethod
    def backward(self, call: BackwardCall) -> None:
        """Write the gradients of an attention."""

    def decode_key(self, q: Array, cache: KVCache, out: Array | None, window: Any, options: tuple[Any, ...]) -> Any:
        """Return the key of a call in `decodes`, or None if it has to be checked.

        The options are the scale, the softcap, the layout, and whether logarithms are wanted.
        """
        return None

    @abstractmethod
    def decode(self, call: DecodeCall) -> Any:
        """Write the result of a decode, and the logarithms of its sums if they are wanted; return its launch."""


ENGINES: EngineTable[AttentionEngine] = EngineTable(__package__, cpu="host", cuda="cuda")
