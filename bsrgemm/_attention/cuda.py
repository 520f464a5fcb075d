"""The engine of attention on the GPU: each call starts kernels on CuPy's current stream."""

from __future__ import annotations

from .._backend import registry
from . import decode_launch, launch
from .call import AttentionCall, DecodeCall
from .engine import AttentionEngine, Launch


class CudaAttention(AttentionEngine):
    """Attention of CuPy arrays."""

    def forward(self, call: AttentionCall) -> Launch | None:
        return launch.forward(self.backend, call)

    def decode(self, call: DecodeCall) -> None:
        decode_launch.decode(call)


ENGINE = CudaAttention(registry.cuda())
