"""The engine of attention on the GPU: each call starts kernels on CuPy's current stream."""

from __future__ import annotations

from typing import Any

import cupy

from .._backend import registry
from .._kernels.kernel import Kernel
from .._kernels.launch import Calls, Chain, Launch
from . import choose, decode_kernel
from .backward import backward
from .call import AttentionCall, BackwardCall, DecodeCall
from .engine import AttentionEngine
from .mask import BlockMask


class CudaAttention(AttentionEngine):
    """Attention of CuPy arrays."""

    decodes: Calls = decode_kernel.CALLS
    decode_key = staticmethod(decode_kernel.decode_key)

    def forward(self, call: AttentionCall) -> Launch | Chain | None:
        with self.backend.recording(call):
            return choose.forward(self.backend, call)

    def known(self, mask: BlockMask | None, key: Any) -> Any:
        return choose.calls_of(mask).get(self._key(key))

    def remember(self, mask: BlockMask | None, key: Any, known: Any) -> None:
        choose.calls_of(mask).remember(self._key(key), known)

    @staticmethod
    def _key(key: Any) -> Any:
        return key, Kernel.forced, cupy.cuda.runtime.getDevice()

    def backward(self, call: BackwardCall) -> Chain | None:
        with self.backend.recording(call):
            return backward(call)

    def decode(self, call: DecodeCall) -> Launch:
        return decode_kernel.decode(call)


ENGINE = CudaAttention(registry.cuda())
