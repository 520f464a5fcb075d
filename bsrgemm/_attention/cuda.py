"""The engine of attention on the GPU: each call starts kernels on CuPy's current stream."""

from __future__ import annotations

from collections.abc import Callable

from .._backend import registry
from .._backend.base import Array
from .._kernels.workspace import retain_for_graph
from . import decode_launch, launch
from .call import AttentionCall, BackwardCall, DecodeCall
from .engine import AttentionEngine, Launch


class CudaAttention(AttentionEngine):
    """Attention of CuPy arrays."""

    def temporary(self, make: Callable[[], Array]) -> Array:
        return retain_for_graph(make)

    def forward(self, call: AttentionCall) -> Launch | None:
        return launch.forward(self.backend, call)

    def backward(self, call: BackwardCall) -> None:
        raise NotImplementedError(
            "attention_backward: has no kernel for the GPU yet; pass NumPy arrays, for example cupy.asnumpy(q)"
        )

    def decode(self, call: DecodeCall) -> None:
        decode_launch.decode(call)


ENGINE = CudaAttention(registry.cuda())
