"""The card, the driver and the versions that numbers were measured with."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import scipy

from .._backend.threads import cores
from .._kernels import jit
from .._version import __version__

#: Packages whose versions are stored with the results; a CUDA library is named after CUDA's version or not.
_PEERS = ("torch", "triton", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cublas-cu12", "nvidia-cublas",
          "nvidia-cusparse-cu12", "nvidia-cusparse", "flash-attn", "flash-attn-3", "flash-attn-4", "warp-lang",
          "nvmath-python", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl")  # fmt: skip


@cache
def has_gpu() -> bool:
    """Is there a card that CuPy can use?"""
    try:
        import cupy
    except ImportError:
        return False
    return bool(cupy.cuda.is_available())


@cache
def cpu_name() -> str:
    """The name of the CPU as its maker gives it; the architecture if the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    for command in (["lscpu"], ["sysctl", "machdep.cpu.brand_string"]):  # Linux on Arm, and macOS
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(command, capture_output=True, text=True, timeout=5, env={**os.environ, "LC_ALL": "C"})
            for line in said.stdout.splitlines():
                name, _, value = line.partition(":")
                if name.strip() in ("Model name", "machdep.cpu.brand_string") and value.strip(" -"):
                    return f"{value.strip()} ({platform.machine()})"
    return platform.processor() or platform.machine()


def describe() -> dict[str, Any]:
    """Card, driver and versions, to be stored with the results."""
    about: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "bsrgemm": __version__,
        "cpu": cpu_name(),
        "cores": cores(),
    }
    if has_gpu():
        import cupy

        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
        about |= {
            "card": properties["name"].decode(),
            "driver": cupy.cuda.runtime.driverGetVersion(),
            "cuda": cupy.cuda.runtime.runtimeGetVersion(),
            "cupy": cupy.__version__,
            "nvrtc": jit.nvrtc_version(),
            "peers": versions(),
        }
    return about


def versions() -> dict[str, str]:
    """The versions of the peers that are installed."""
    found = {}
    for name in _PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
