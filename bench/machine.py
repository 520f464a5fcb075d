"""What numbers were measured with: card, driver, versions and commit."""

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

import bsrgemm

ROOT = Path(__file__).resolve().parents[1]
#: Packages whose versions are stored; a CUDA library is named after CUDA's version or not.
_PEERS = ("torch", "triton", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cublas-cu12", "nvidia-cublas",
          "nvidia-cusparse-cu12", "nvidia-cusparse", "flash-attn", "flash-attn-3", "flash-attn-4", "warp-lang",
          "nvmath-python", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "pyamg", "mpi4py", "dask")  # fmt: skip


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
    return platform.machine()


def describe() -> dict[str, Any]:
    """Date, card, driver and versions."""
    about: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "bsrgemm": bsrgemm.__version__,
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "peers": versions(),
    }
    if has_gpu():
        import cupy

        runtime = cupy.cuda.runtime
        about |= {
            "card": runtime.getDeviceProperties(runtime.getDevice())["name"].decode(),
            "driver": runtime.driverGetVersion(),
            "cuda": runtime.runtimeGetVersion(),
            "cupy": cupy.__version__,
            "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        }
    return about


def versions() -> dict[str, str]:
    """The versions of the peers that are installed."""
    found = {}
    for name in _PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit(told: str | None = None, root: Path = ROOT) -> dict[str, Any]:
    """The commit of a checkout, and whether its tracked files differ from it; both None where there is no history.

    What was told comes first, with a + where files differ: a copy of a checkout may have no history, or another one.
    """
    if told:
        return {"commit": told.rstrip("+"), "dirty": told.endswith("+")}
    try:
        found = _git(root, "rev-parse", "HEAD")
        dirty = bool(_git(root, "status", "--porcelain", "--untracked-files=no", "--", "bsrgemm", "cuda"))
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
    return {"commit": found, "dirty": dirty}


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()
