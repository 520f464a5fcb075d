"""The one place where kernels are started, and what brings arrays into the layout that kernels read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import cupy

from . import graphs, jit
from .jit import KernelSpec


class KernelConfig(Protocol):
    """The interface of every kernel config: the kernel to compile, and the number of threads of a thread block."""

    @property
    def threads(self) -> int: ...

    def spec(self) -> KernelSpec: ...


def start(
    kernel: Any,
    grid: tuple[int, ...],
    threads: tuple[int, ...],
    args: tuple[Any, ...],
    uses: Iterable[Any],
    shared_bytes: int = 0,
) -> None:
    """Start a kernel on CuPy's current device and stream.

    `uses` are the arrays that it reads or writes, or objects that hold them: if a graph is being captured, they live as
    long as the graph. Arrays among `args` need not be named.
    """
    capture = graphs.current()
    if capture is not None:
        capture.keep(*uses, *args)
    kernel(grid, threads, args, shared_mem=shared_bytes)


def run(
    config: KernelConfig,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    threads: int | None = None,
    uses: Iterable[Any] = (),
    shared_bytes: int = 0,
) -> None:
    """Load a kernel and start it; `threads` if they are other ones than its own."""
    kernel = jit.load(config.spec(), jit.device_target())
    if shared_bytes:
        kernel.max_dynamic_shared_size_bytes = shared_bytes
    start(kernel, grid, (threads or config.threads,), args, uses, shared_bytes)


def contiguous(x: Any) -> Any:
    """Return the array if it is C-contiguous, otherwise a C-contiguous copy; kernels read nothing else."""
    return x if x.flags.c_contiguous else cupy.ascontiguousarray(x)
