"""The interface of an engine of attention, and the table of engines by backend."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .._backend.base import Backend
from .._backend.engines import EngineTable
from .call import AttentionCall, DecodeCall


class AttentionEngine(ABC):
    """Attention on the arrays of one backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @abstractmethod
    def forward(self, call: AttentionCall) -> None:
        """Write the result of an attention, and the logarithms of its sums if they are wanted."""

    @abstractmethod
    def decode(self, call: DecodeCall) -> None:
        """Write the result of a decode, and the logarithms of its sums if they are wanted."""


ENGINES: EngineTable[AttentionEngine] = EngineTable(__package__, cpu="host", cuda="cuda")
