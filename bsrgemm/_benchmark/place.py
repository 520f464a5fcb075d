"""Where problems are measured: the CPU or CuPy's current GPU, with its arrays, its clock and its two ceilings."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from . import machine, random_data
from .peers import products as product_peers
from .timing import Call, Clock, time_sustained

#: Seconds back to back for a sustained rate
SUSTAINED = 0.5
#: Bytes that are copied to find the bandwidth: far more than any cache holds
_COPIED = {"cpu": 256 << 20, "cuda": 2 << 30}
#: Sides of the dense product that stands for the rate of a kind of number
_DENSE = {"cpu": 1024, "cuda": 8192}


Draw = Callable[[tuple[int, ...], str], Any]


class Place(Protocol):
    """The interface to the machine on which a problem is measured."""

    name: str
    xp: Any

    def normal(self, shape: tuple[int, ...], kind: str) -> Any:
        """Standard normal numbers."""

    def zeros(self, shape: tuple[int, ...], kind: str) -> Any:
        """Zeros, for a first call that compiles; they are never timed."""

    def clock(self, quick: bool) -> Clock:
        """How calls are timed here."""

    def sustained(self, call: Call) -> float | None:
        """Mean seconds of calls back to back, which shows the effect of a power limit."""

    def free_bytes(self) -> int:
        """Memory that operands may take."""

    def dense_product(self, A: Any, B: Any, out: Any, tf32: bool = False) -> Call:
        """out = A B by the BLAS of this machine."""

    def synchronize(self) -> None:
        """Wait for all work; raises where something went wrong."""

    def release(self) -> None:
        """Free cached memory."""


class Cpu:
    """NumPy on the host."""

    name = "cpu"
    xp: Any = np

    def normal(self, shape: tuple[int, ...], kind: str) -> Any:
        return random_data.normal(shape, kind, np)

    def zeros(self, shape: tuple[int, ...], kind: str) -> Any:
        return np.zeros(shape, random_data.stored_dtype(kind))

    def clock(self, quick: bool) -> Clock:
        return Clock("cpu", quick)

    def sustained(self, call: Call) -> float | None:
        return None

    def free_bytes(self) -> int:
        return _available_bytes()

    def dense_product(self, A: Any, B: Any, out: Any, tf32: bool = False) -> Call:
        return lambda: np.matmul(A, B, out=out)

    def synchronize(self) -> None:
        pass

    def release(self) -> None:
        pass


class Gpu:
    """CuPy on its current device."""

    name = "cuda"

    def __init__(self) -> None:
        import cupy

        self.xp = cupy

    def normal(self, shape: tuple[int, ...], kind: str) -> Any:
        return random_data.normal(shape, kind, self.xp)

    def zeros(self, shape: tuple[int, ...], kind: str) -> Any:
        return self.xp.zeros(shape, random_data.stored_dtype(kind))

    def clock(self, quick: bool) -> Clock:
        return Clock("cuda", quick)

    def sustained(self, call: Call) -> float | None:
        return time_sustained(call, SUSTAINED)

    def free_bytes(self) -> int:
        free, _ = self.xp.cuda.runtime.memGetInfo()
        return int(free) + int(self.xp.get_default_memory_pool().free_bytes())

    def dense_product(self, A: Any, B: Any, out: Any, tf32: bool = False) -> Call:
        return product_peers.dense_cublas(A, B, out, tf32)

    def synchronize(self) -> None:
        self.xp.cuda.Device().synchronize()

    def release(self) -> None:
        self.xp.get_default_memory_pool().free_all_blocks()


def _available_bytes() -> int:
    """What the kernel would give, and what a container's limit leaves."""
    found = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, IndexError, ValueError):
        meminfo = Path("/proc/meminfo").read_text()
        found = [int(meminfo.split("MemAvailable:")[1].split()[0]) << 10]
    with contextlib.suppress(OSError, ValueError):  # "max" instead of a number means no limit
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        found.append(limit - used)
    return max(0, min(found))


class Ceilings:
    """The two roofs of a place, measured on first use and then cached: copying, and dense products.

    What cannot be measured, for want of memory or of a BLAS for that dtype, is None: there is no such roof then.
    """

    def __init__(self, place: Place, quick: bool = False) -> None:
        self._place = place
        self._quick = quick
        self._found: dict[str, float | None] = {}

    def _kept(self, name: str, measure: Callable[[], float | None]) -> float | None:
        if name not in self._found:
            try:
                self._found[name] = measure()
            except Exception:
                self._found[name] = None
        return self._found[name]

    def bytes_per_second(self) -> float | None:
        """Bytes read and written in a second by a plain copy."""
        return self._kept("copy", self._copy)

    def flops_per_second(self, kind: str) -> float | None:
        """The rate of a dense product of this kind of number."""
        return self._kept(kind, lambda: self._dense(kind))

    def _copy(self) -> float:
        place = self._place
        count = _COPIED[place.name] // (4 if self._quick else 1)
        source = place.xp.ones(count // 8, np.float64)
        target = place.xp.empty_like(source)

        def copy() -> None:
            target[...] = source

        return 2 * count / place.clock(self._quick).seconds(copy)

    def _dense(self, kind: str) -> float | None:
        place, tf32 = self._place, kind == "tf32"
        stored = "float32" if tf32 else kind
        if kind == "e4m3" or (place.name == "cpu" and stored not in ("float32", "float64")):
            return None
        side = _DENSE[place.name]
        A, B = (place.normal((side, side), stored) for _ in range(2))
        call = place.dense_product(A, B, place.xp.empty((side, side), A.dtype), tf32)
        return 2.0 * side**3 / place.clock(self._quick).seconds(call)

    def least_seconds(self, kind: str, flops: float, traffic: float) -> float | None:
        """What the roofs allow: the larger of the time to compute and the time to move."""
        rate, bandwidth = self.flops_per_second(kind), self.bytes_per_second()
        return None if rate is None or bandwidth is None else max(flops / rate, traffic / bandwidth)

    def as_dict(self) -> dict[str, Any]:
        """The bounds that have been measured so far."""
        rates = {kind: rate for kind, rate in self._found.items() if kind != "copy" and rate}
        return {"bytes_per_second": self._found.get("copy"), "flops_per_second": rates}


def place_of(device: str | None) -> Place:
    """The place with this name; by default the GPU if there is one."""
    if device == "cpu" or (device is None and not machine.has_gpu()):
        return Cpu()
    return Gpu()
