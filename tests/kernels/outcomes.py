"""What NVRTC said about a kernel, kept between runs: a compile takes a second, reading its outcome none.

An entry is found by a digest of everything that the outcome depends on: the sources, the options and the compiler
itself. A test judges the log each time, so that a spill fails from the cache as it does from the compiler.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from bsrgemm._kernels import jit
from bsrgemm._kernels.jit import digest, gather

#: Where outcomes are kept; an empty value keeps none.
VARIABLE = "BSRGEMM_TEST_CACHE"


@dataclass(frozen=True)
class Outcome:
    """The log of a compile that succeeded, and the CPU time of its thread in seconds."""

    log: str
    seconds: float


def folder() -> Path | None:
    """``$BSRGEMM_TEST_CACHE``, by default a folder of its own in the user's cache directory; None if it is empty."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) / "compiles" if named else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "bsrgemm-tests", "compiles")


def outcome(spec: jit.KernelSpec, arch: str) -> Outcome:
    """What compiling `spec` for `arch` says: from the cache, otherwise from the compiler, which may raise."""
    where, key = folder(), key_of(spec, arch)
    found = _read(where / f"{key}.json", key) if where else None
    if found is None:
        start = time.thread_time()  # of this thread alone: the machine may have other work
        compiled = jit.compile_cubin(spec, arch)
        found = Outcome(compiled.log, time.thread_time() - start)
        if where:
            _write(where / f"{key}.json", key, found)
    return found


def key_of(spec: jit.KernelSpec, arch: str) -> str:
    """A digest of all that the outcome depends on. Kernels of one source are compiled together: the log names them."""
    parts = (digest(gather(spec.source)), spec.source, jit.options(spec, arch), compiler())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@cache
def compiler() -> tuple[str, ...]:
    """NVRTC's version, and digests of its libraries: builds of one version differ in what they make."""
    version = jit.nvrtc_version()  # which loads the library
    lines = Path("/proc/self/maps").read_text().splitlines()
    folders = {Path(line.split()[-1]).parent for line in lines if "/libnvrtc.so" in line}
    files = [
        file for where in folders for name in ("libnvrtc.so*", "libnvrtc-builtins.so*") for file in where.glob(name)
    ]
    return version, *sorted({hashlib.sha256(file.read_bytes()).hexdigest() for file in files})


def _read(path: Path, key: str) -> Outcome | None:
    """The entry at `path`; None where there is none, or one that was not written whole for this key."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        return Outcome(**entry["outcome"]) if entry["check"] == _check(key, entry["outcome"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, key: str, made: Outcome) -> None:
    """Add an entry, which others see whole or not at all. A folder that cannot be written keeps nothing."""
    text = json.dumps({"outcome": asdict(made), "check": _check(key, asdict(made))})
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, path)


def _check(key: str, entry: dict[str, object]) -> str:
    return hashlib.sha256(f"{key} {json.dumps(entry, sort_keys=True)}".encode()).hexdigest()
