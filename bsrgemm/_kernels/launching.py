"""Starting kernels that take separate arguments, and the memory layout that kernels read."""

from __future__ import annotations

from typing import Any, Protocol

import cupy

from . import jit
from .jit import KernelSpec


class KernelConfig(Protocol):
    """What every config of a kernel offers: the source with its definitions, and threads of a thread block."""

    @property
    def threads(self) -> int: ...

    def spec(self) -> KernelSpec: ...


def run(config: KernelConfig, grid: tuple[int, ...], args: tuple[Any, ...], threads: int | None = None) -> None:
    """Start a kernel with separate arguments on CuPy's current device and stream."""
    jit.load(config.spec(), jit.device_target())(grid, (threads or config.threads,), args)


def contiguous(x: Any) -> Any:
    """The array, or a copy in one piece of memory, which is how kernels read it."""
    return x if x.flags.c_contiguous else cupy.ascontiguousarray(x)
