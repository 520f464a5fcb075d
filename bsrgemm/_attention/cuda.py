"""The engine of attention on the GPU: each call starts kernels on CuPy's current stream."""

from __future__ import annotations

from .._backend import registry
from . import backward_launch, decode_launch, launch
from .call import AttentionCall, BackwardCall, DecodeCall
from .engine import AttentionEngine, Launch


class CudaAttention(AttentionEngine):
    """Attention of CuPy arrays."""

    repeats_decode = True

    def forward(self, call: AttentionCall) -> Launch | None:
        with self.backend.recording(call):
            return launch.forward(self.backend, call)

    def backward(self, call: BackwardCall) -> None:
        with self.backend.recording(call):
            backward_launch.backward(self.backend, call)

    def decode(self, call: DecodeCall) -> None:
        decode_launch.decode(call)


ENGINE = CudaAttention(registry.cuda())
