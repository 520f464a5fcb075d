"""Helpers that launch kernels with separate arguments and bring arrays into the layout that kernels read."""

from __future__ import annotations

from typing import Any, Protocol

import cupy

from . import jit
from .jit import KernelSpec


class KernelConfig(Protocol):
    """The interface of every kernel config: the kernel to compile, and the number of threads of a thread block."""

    @property
    def threads(self) -> int: ...

    def spec(self) -> KernelSpec: ...


def run(config: KernelConfig, grid: tuple[int, ...], args: tuple[Any, ...], threads: int | None = None) -> None:
    """Launch a kernel with separate arguments on CuPy's current device and stream."""
    jit.load(config.spec(), jit.device_target())(grid, (threads or config.threads,), args)


def contiguous(x: Any) -> Any:
    """Return the array if it is C-contiguous, otherwise a C-contiguous copy; kernels read nothing else."""
    return x if x.flags.c_contiguous else cupy.ascontiguousarray(x)
