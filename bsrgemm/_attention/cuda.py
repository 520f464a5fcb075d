"""The engine of attention on the GPU: each call starts kernels on CuPy's current stream."""

from __future__ import annotations

from collections.abc import Callable

from .._backend import registry
from .._backend.base import Array
from .._kernels import graphs
from .._kernels.launch import Calls
from .._kernels.launch import Launch as DecodeLaunch
from . import backward_launch, decode_kernel, launch
from .call import AttentionCall, BackwardCall, DecodeCall
from .engine import AttentionEngine, Launch


class CudaAttention(AttentionEngine):
    """Attention of CuPy arrays."""

    decodes: Calls = decode_kernel.CALLS
    decode_key = staticmethod(decode_kernel.decode_key)

    def temporary(self, make: Callable[[], Array]) -> Array:
        with graphs.memory():
            return make()

    def forward(self, call: AttentionCall) -> Launch | None:
        with self.backend.recording(call):
            return launch.forward(self.backend, call)

    def backward(self, call: BackwardCall) -> None:
        with self.backend.recording(call):
            backward_launch.backward(self.backend, call)

    def decode(self, call: DecodeCall) -> DecodeLaunch:
        return decode_kernel.decode(call)


ENGINE = CudaAttention(registry.cuda())
