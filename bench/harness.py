"""What every benchmark shares: timing on either home, one aligned line per case, JSON with the machine inside."""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy

import bsrgemm as bg
from bsrgemm import jit

RESULTS = Path(__file__).parent / "results"
#: Read between timings, so that no case finds its operands in the L2 cache. A memset would leave dirty lines there.
_FLUSH_BYTES = 512 << 20


def has_gpu() -> bool:
    """Is there a card that CuPy can use?"""
    try:
        import cupy
    except ImportError:
        return False
    return cupy.cuda.is_available()


def time_cpu(call: Callable[[], Any], repeats: int = 7) -> float:
    """Median seconds of a call."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def time_gpu(call: Callable[[], Any], repeats: int = 20, idle: float = 0.0) -> float:
    """Median seconds of a call between two events, L2 flushed before each."""
    import cupy

    flush = cupy.ones(_FLUSH_BYTES // 4, np.float32)
    for _ in range(3):
        call()
    cupy.cuda.Device().synchronize()
    time.sleep(idle)
    events = []
    for _ in range(repeats):
        flush.sum()
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        call()
        stop.record()
        events.append((start, stop))
    cupy.cuda.Device().synchronize()
    return statistics.median(cupy.cuda.get_elapsed_time(a, b) for a, b in events) / 1e3


def time_sustained(call: Callable[[], Any], seconds: float = 1.0) -> float:
    """Mean seconds of a call, back to back for about so many seconds, nothing flushed: what the power limit leaves."""
    import cupy

    start, middle, stop = cupy.cuda.Event(), cupy.cuda.Event(), cupy.cuda.Event()
    call()
    start.record()
    call()
    middle.record()
    middle.synchronize()
    count = max(1, round(seconds * 1e3 / max(cupy.cuda.get_elapsed_time(start, middle), 1e-3)))
    middle.record()
    for _ in range(count):
        call()
    stop.record()
    stop.synchronize()
    return cupy.cuda.get_elapsed_time(middle, stop) / 1e3 / count


def machine() -> dict[str, Any]:
    """Card, driver and versions, to be kept with the numbers."""
    about: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "bsrgemm": bg.__version__,
        "cpu": platform.machine(),
    }
    if has_gpu():
        import cupy

        about |= {
            "card": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
            "driver": cupy.cuda.runtime.driverGetVersion(),
            "cupy": cupy.__version__,
            "nvrtc": jit.nvrtc_version(),
        }
    return about


class Table:
    """Lines printed as they come (in colour where rich is installed), kept for the JSON."""

    def __init__(self, name: str, title: str) -> None:
        self.name = name
        self.rows: list[dict[str, Any]] = []
        try:
            from rich.console import Console

            self._print = Console(highlight=True, width=120, soft_wrap=True).print
        except ImportError:
            self._print = print
        self._print(f"{title} on {machine().get('card', 'the CPU')}")

    def note(self, text: str) -> None:
        """A line for the reader alone."""
        self.progress("")
        self._print(text.rstrip())

    def add(self, text: str, **values: Any) -> None:
        self.note(text)
        self.rows.append(values)

    def progress(self, text: str) -> None:
        """What is being measured, on a terminal alone; the next line replaces it."""
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def write(self) -> Path:
        """Write bench/results/<name>.json and say where."""
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.name}.json"
        path.write_text(json.dumps({"machine": machine(), "rows": self.rows}, indent=1) + "\n")
        self._print(f"written: {path.relative_to(RESULTS.parents[1])}")
        return path
