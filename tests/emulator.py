"""Plain kernels on the CPU: their sources, compiled by a C++ compiler with a thread for each of their threads."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from bsrgemm import attention_launch, device, jit, launch, mask_tiles, prepared, tuned
from bsrgemm.jit import KernelSpec
from bsrgemm.sources import cuda_root, gather

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("clang++")


class Array(np.ndarray[Any, Any]):
    """An array with a pointer, as CuPy has them."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return _Pointer(self.ctypes.data)

    def get(self) -> np.ndarray[Any, Any]:
        return np.array(self, subok=False)


class _Pointer:
    def __init__(self, address: int) -> None:
        self.ptr = address


def put(x: Any) -> Array:
    """An array of its own, at a multiple of 256 bytes as on a card."""
    x = np.asarray(x)
    room = np.empty(x.nbytes + 256, np.uint8)
    skip = -room.ctypes.data % 256
    out = room[skip : skip + x.nbytes].view(x.dtype).reshape(x.shape).view(Array)
    out[...] = x
    return out


def guarded(x: Any, before: bool = False) -> Array:
    """An array that ends, or begins, where reading and writing ends the process."""
    x = np.asarray(x)
    page = mmap.PAGESIZE
    body = -(-max(1, x.nbytes) // page) * page
    room = mmap.mmap(-1, body + page)
    memory = np.frombuffer(room, np.uint8)
    guard = memory.ctypes.data if before else memory.ctypes.data + body
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0
    first = page if before else body - x.nbytes
    out = memory[first : first + x.nbytes].view(x.dtype).reshape(x.shape).view(Array)
    out[...] = x
    return out


@contextmanager
def emulated(folder: Path, put: Callable[[Any], Array] = put) -> Iterator[None]:
    """Launches go to the emulator, and what they allocate lies where it finds it."""
    event = SimpleNamespace(done=True)
    stream = SimpleNamespace(record=lambda: event, is_capturing=lambda: False, ptr=0)
    stand_in = SimpleNamespace(
        empty=lambda *args: put(np.empty(*args)),
        zeros=lambda *args: put(np.zeros(*args)),
        concatenate=lambda arrays: put(np.concatenate(arrays)),
        ascontiguousarray=lambda x: put(np.ascontiguousarray(x)),
        cuda=SimpleNamespace(
            get_current_stream=lambda: stream,
            is_available=lambda: False,
            runtime=SimpleNamespace(getDevice=lambda: "emulated"),
        ),
    )
    tiles, sequences = mask_tiles.tiles, mask_tiles.sequences

    def place(arrays: Any) -> list[Any]:
        return [put(x) if isinstance(x, np.ndarray) else x for x in arrays]

    lists = SimpleNamespace(
        tiles=lambda *args: mask_tiles.Tiles(*place(tiles(*args))),
        sequences=lambda xp, *args: place(sequences(np, *args)),
    )
    index, long_rows, shares = prepared.Prepared.index, prepared.Prepared.long_rows, launch._shares

    def placed_long_rows(*args: Any) -> Any:
        rows = long_rows(*args)
        return replace(rows, pieces=put(rows.pieces), parents=put(rows.parents), count=put(rows.count))

    patches = [
        *(patch.object(module, "cupy", stand_in) for module in (launch, prepared, device, attention_launch)),
        patch.object(launch, "_zeroed", {}),
        patch.object(attention_launch, "mask_tiles", lists),
        patch.object(attention_launch, "_multiprocessors", lambda: 1),
        patch.object(attention_launch, "_plans", {}),
        patch.object(launch, "_multiprocessors", lambda: 2),
        patch.object(prepared.Prepared, "long_rows", placed_long_rows),
        patch.object(launch, "_shares", lambda *args: put(shares(*args))),
        patch.object(tuned, "choice", lambda problem: None),
        patch.object(jit, "device_target", lambda: "sm_75"),
        patch.object(jit, "load", lambda spec, arch: load(spec, folder)),
        patch.object(
            prepared.Prepared, "index", lambda *args: tuple(None if x is None else put(x) for x in index(*args))
        ),
    ]
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


class Kernel:
    """What `jit.load` returns: called with a grid, a number of threads and arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __call__(self, grid: tuple[int, ...], threads: tuple[int], args: tuple[Any, ...], shared_mem: int = 0) -> None:
        assert shared_mem == 0
        held = [self._bytes(x) for x in args]
        places = (ctypes.c_void_p * len(held))(*(x.ctypes.data for x in held))
        self._library.emulate(places, *(*grid, 1, 1)[:3], threads[0])

    @staticmethod
    def _bytes(x: Any) -> Array:
        """An argument as it lies in memory: an array is a pointer, a struct or a number itself."""
        return put(np.frombuffer(np.uint64(x.ctypes.data) if isinstance(x, Array) else x.tobytes(), np.uint8))


@cache
def load(spec: KernelSpec, folder: Path) -> Kernel:
    """The kernel of a spec, compiled into that folder."""
    assert COMPILER is not None
    text = "\n".join(
        [
            '#include "emulator.h"',
            f'#include "{spec.source}"',
            'extern "C" void emulate(void** arguments, unsigned x, unsigned y, unsigned z, unsigned threads) {',
            f"  emulator::launch({spec.entry}, arguments, {{x, y, z}}, threads);",
            "}\n",
        ]
    )
    gather(spec.source)  # all that it includes is there
    name = hashlib.sha256(repr(spec).encode()).hexdigest()[:16]
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(text)
    defines = [f"-D{key}={value}" for key, value in spec.defines]
    command = [COMPILER, "-std=c++20", "-O0", "-w", "-fPIC", "-shared", "-pthread", f"-I{HERE}", f"-I{cuda_root()}"]
    subprocess.run([*command, *defines, str(source), "-o", str(library)], check=True)
    return Kernel(ctypes.CDLL(str(library)))
