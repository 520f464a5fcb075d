"""What every benchmark shares: timing on either home, one aligned line per case, JSON with the machine inside."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import scipy

import bsrgemm as bg
from bsrgemm import jit

RESULTS = Path(__file__).parent / "results"
#: Read between timings, so that no case finds its operands in the L2 cache. A memset would leave dirty lines there.
_FLUSH_BYTES, _FLUSHES = 512 << 20, 3


@cache
def has_gpu() -> bool:
    """Is there a card that CuPy can use?"""
    try:
        import cupy
    except ImportError:
        return False
    return cupy.cuda.is_available()


def on_gpu() -> bool:
    """Are things measured on the card? (Tests say no by replacing `has_gpu`.)"""
    return has_gpu()


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
    """Median seconds of a call between two events, L2 flushed before each.

    The flush is long enough for the host to have launched the call before it ends: a slow host is not to be measured.
    """
    import cupy

    flush = cupy.ones(_FLUSH_BYTES // 4, np.float32)
    for _ in range(3):
        call()
    cupy.cuda.Device().synchronize()
    time.sleep(idle)
    events = []
    for _ in range(repeats):
        for _ in range(_FLUSHES):
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
            "peers": versions(),
        }
    return about


#: Whose versions are kept with the numbers; a CUDA library is named after CUDA's version or not.
_PEERS = ("torch", "triton", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cublas-cu12", "nvidia-cublas",
          "nvidia-cusparse-cu12", "nvidia-cusparse", "flash-attn-4")  # fmt: skip


def versions() -> dict[str, str]:
    """What is installed of the peers."""
    found = {}
    for name in _PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


class Table:
    """Lines printed as they come (in colour where rich is installed), kept for the JSON."""

    def __init__(self, name: str, title: str) -> None:
        self.name = name
        self.rows: list[dict[str, Any]] = []
        self._print: Callable[..., Any]
        try:
            from rich.console import Console

            self._print = partial(Console(highlight=True, width=120, soft_wrap=True).print, markup=False)
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

    def write(self, cut: str | None = None) -> Path:
        """Write bench/results/<name>.json and say where; `cut` is why rows are missing."""
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.name}.json"
        about = {"machine": machine(), "rows": self.rows} | ({} if cut is None else {"cut": cut})
        whole = path.with_suffix(".tmp")
        whole.write_text(json.dumps(about, indent=1) + "\n")
        whole.replace(path)  # all of it or nothing, also over a file that may not be written
        self._print(f"written: bench/results/{path.name}{'' if cut is None else ', in part'}")
        return path


@contextlib.contextmanager
def writing(table: Table, keep: bool = True) -> Iterator[None]:
    """Write the table's file behind this block, also when it fails or is stopped (SIGTERM is what `timeout` sends)."""

    def stop(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    cut: str | None = None
    try:
        yield
    except BaseException as error:
        cut = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
        raise
    finally:
        if keep and (table.rows or cut is None):
            table.write(cut and cut.split("\n")[0])
        signal.signal(signal.SIGTERM, before)
