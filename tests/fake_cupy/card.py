"""The fake card: what it is, and what becomes of a launch."""

from __future__ import annotations

import enum
import gc
from dataclasses import dataclass
from typing import Any

import numpy as np

from bsrgemm._kernels.jit import MAX_GRID_X, MAX_GRID_YZ, KernelSpec

from ..emulator import emulator
from . import arrays, memory, streams

#: Shared memory in bytes that a CTA may have, by architecture; those that are not named have 99 KiB.
_SHARED = {"sm_75": 64 << 10, "sm_80": 163 << 10, "sm_90a": 227 << 10, "sm_100": 227 << 10}
#: Kernels whose numbers the host reads before it goes on: they run under every policy, and are noted where all do.
_ANSWERING = ("check_pattern", "kept_places", "csr_blocks", "block_elements")
#: Dynamic shared memory that a kernel may have without asking for more.
_UNASKED = 48 << 10


class Policy(enum.Enum):
    """What becomes of a launch."""

    EMULATE = "it runs on the emulator; in a capture, when the graph runs"
    RECORD = "it is noted in `Card.launches` and does not run"
    NOTHING = "it is neither noted nor run"


@dataclass(frozen=True)
class Launched:
    """A launch: its kernel, grid and threads, the bytes of its arguments, its shared memory."""

    spec: KernelSpec
    grid: tuple[int, ...]
    threads: tuple[int, ...]
    arguments: tuple[bytes, ...]
    shared_bytes: int

    @property
    def entry(self) -> str:
        return self.spec.entry


class Kernel:
    """What `jit.load` returns: called with a grid, threads and arguments, it does what the card's policy says."""

    def __init__(self, card: Card, spec: KernelSpec) -> None:
        self._card, self._spec = card, spec
        self.max_dynamic_shared_size_bytes = _UNASKED
        self._emulated: Any = None

    def __call__(self, grid: Any, threads: Any, args: tuple[Any, ...], *, shared_mem: int = 0) -> None:
        grid, threads = tuple(map(int, grid)), tuple(map(int, threads))
        self._check(grid, threads, shared_mem)
        card, answers = self._card, self._spec.entry in _ANSWERING
        if card.policy is Policy.NOTHING and not answers:
            return
        packed = tuple(map(_bytes, args))
        if card.policy is Policy.EMULATE or not answers:
            card.launches.append(Launched(self._spec, grid, threads, packed, shared_mem))
        if card.policy is Policy.EMULATE or answers:
            if self._emulated is None:
                self._emulated = card.emulated(self._spec)
            kernel = self._emulated
            streams.do(lambda: kernel(grid, threads, tuple(map(_Bytes, packed)), shared_mem=shared_mem))

    def _check(self, grid: tuple[int, ...], threads: tuple[int, ...], shared_mem: int) -> None:
        """Refuse what CUDA refuses."""
        sides = (*grid, 1, 1)[:3]
        fits = all(0 < n <= most for n, most in zip(sides, (MAX_GRID_X, MAX_GRID_YZ, MAX_GRID_YZ), strict=True))
        allowed = max(_UNASKED, self.max_dynamic_shared_size_bytes)
        if not fits or not 0 < int(np.prod(threads)) <= 1024 or shared_mem > min(allowed, self._card.shared_bytes):
            raise streams.CUDARuntimeError(
                f"cudaErrorInvalidValue: {self._spec.entry} with grid {grid}, {threads} threads, {shared_mem} bytes"
            )


class _Bytes:
    """An argument as the emulator takes it."""

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    def tobytes(self) -> bytes:
        return self.packed


def _bytes(x: Any) -> bytes:
    """An argument as it lies in memory: an array is its address."""
    if isinstance(x, arrays.ndarray):
        return np.uint64(x.data.ptr).tobytes()
    if isinstance(x, int | float | bool):
        return np.asarray(x).tobytes()
    found: bytes = x.tobytes()
    return found


class Card:
    """A card with memory of its own.

    Parameters
    ----------
    arch : str
        The architecture that kernels are chosen for, such as "sm_90a".
    multiprocessors : int
        Few, so that CTAs go round several times.
    before : bool
        Whether the guard page lies before each allocation instead of after it.
    races : bool
        Whether kernels end the process at a race of two threads.
    number : int
        The number of the device. No other card of the process has it: nothing is remembered from one to the next.
    """

    def __init__(
        self,
        arch: str = "sm_80",
        multiprocessors: int = 2,
        before: bool = False,
        races: bool = False,
        policy: Policy = Policy.EMULATE,
        number: int = 0,
    ) -> None:
        self.arch, self.multiprocessors, self.races, self.policy, self.number = (
            arch, multiprocessors, races, policy, number,
        )  # fmt: skip
        self.heap = memory.Heap(number, before)
        self.l2_bytes = 50 << 20
        self.launches: list[Launched] = []
        self._kernels: dict[KernelSpec, Kernel] = {}

    @property
    def shared_bytes(self) -> int:
        return _SHARED.get(self.arch, 99 << 10)

    @property
    def capability(self) -> str:
        """The compute capability as CuPy writes it: "90"."""
        return self.arch.removeprefix("sm_").rstrip("af")

    @property
    def attributes(self) -> dict[str, int]:
        return {
            "MultiProcessorCount": self.multiprocessors,
            "L2CacheSize": self.l2_bytes,
            "MaxSharedMemoryPerBlockOptin": self.shared_bytes,
            "MaxSharedMemoryPerMultiprocessor": self.shared_bytes + 1024,
            "MaxThreadsPerBlock": 1024,
            "MaxThreadsPerMultiProcessor": 2048,
            "WarpSize": 32,
            "ClockRate": 1980000,
        }

    def load(self, spec: KernelSpec, arch: str, *, root: Any = None) -> Kernel:
        """As `jit.load`, for the emulator."""
        assert arch == self.arch and root is None, (arch, root)
        if spec not in self._kernels:
            self._kernels[spec] = Kernel(self, spec)
        return self._kernels[spec]

    def emulated(self, spec: KernelSpec) -> Any:
        return emulator.load(spec, emulator.builds(), races=self.races or emulator.watches_races())

    def close(self) -> None:
        """Give the memory back."""
        self._kernels.clear()
        gc.collect()
        gc.freeze()  # what is left stays, and need not be looked at when the next card is closed
        self.heap.close()
