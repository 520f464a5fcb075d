"""Kernels on the CPU: their sources, compiled by a C++ compiler with a thread for each of their threads."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import mmap
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from bsrgemm._attention import decode_launch, mask_tiles
from bsrgemm._attention import launch as attention_launch
from bsrgemm._attention.call import AttentionCall
from bsrgemm._backend import cupy_backend
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._kernels import device, jit, launching, tensor_map, workspace
from bsrgemm._kernels.jit import KernelSpec
from bsrgemm._kernels.sources import gather
from bsrgemm._products import (
    block_products,
    complex_gemm,
    launch,
    matrix_cache,
    measured,
    row_matching,
    spgemm_pattern,
    work_list_launch,
)
from bsrgemm._products import cuda as products_cuda

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
def emulated(folder: Path, put: Callable[[Any], Array] = put, arch: str = "sm_75") -> Iterator[None]:
    """Launches go to the emulator, those of kernels for `arch`, and what they allocate lies where it finds it."""
    event = SimpleNamespace(done=True)
    stream = SimpleNamespace(record=lambda: event, is_capturing=lambda: False, ptr=0)
    stand_in = SimpleNamespace(
        empty=lambda *args: put(np.empty(*args)),
        zeros=lambda *args: put(np.zeros(*args)),
        cumsum=np.cumsum,
        concatenate=lambda arrays: put(np.concatenate(arrays)),
        arange=lambda *args, **how: put(np.arange(*args, **how)),
        empty_like=lambda x: put(np.empty_like(x)),
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
    index, shares = matrix_cache.MatrixCache.index, matrix_cache.MatrixCache.shares

    def placed(make: Callable[..., Any]) -> Callable[..., Any]:
        """Lists that are made of arrays, with arrays that have pointers."""

        def call(*args: Any) -> Any:
            made = make(*args)
            arrays = {f.name: getattr(made, f.name) for f in fields(made)}
            return replace(made, **{name: put(x) for name, x in arrays.items() if isinstance(x, np.ndarray)})

        return call

    patches = [
        *(
            patch.object(module, "cupy", stand_in)
            for module in (
                *(launch, matrix_cache, cupy_backend, attention_launch, decode_launch, workspace, launching, device),
                *(spgemm_pattern, work_list_launch, row_matching, block_products, complex_gemm, products_cuda),
            )
        ),
        patch.object(device, "shared_bytes_per_block", lambda: 96 << 10),
        patch.object(device, "multiprocessors", lambda: 2),
        patch.object(device, "l2_bytes", lambda: 50 << 20),
        patch.object(workspace, "_zeroed", {}),
        patch.object(attention_launch, "mask_tiles", lists),
        patch.object(attention_launch, "_plans", {}),
        patch.object(decode_launch, "_plans", {}),
        *(
            patch.object(matrix_cache.MatrixCache, name, placed(getattr(matrix_cache.MatrixCache, name)))
            for name in ("long_rows", "groups", "whole_items", "split_items")
        ),
        patch.object(matrix_cache.MatrixCache, "shares", lambda *args: put(shares(*args))),
        patch.object(measured, "choice", lambda problem: None),
        patch.object(jit, "device_target", lambda: arch),
        patch.object(tensor_map, "encode", encode),
        patch.object(jit, "load", lambda spec, arch: load(spec, folder)),
        patch.object(
            matrix_cache.MatrixCache, "index", lambda *args: tuple(None if x is None else put(x) for x in index(*args))
        ),
    ]
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


def run_attention(call: AttentionCall) -> None:
    """An attention of NumPy's arrays by the kernel that `forward` chooses, within `emulated`."""
    arrays = {name: put(getattr(call, name)) for name in ("q", "k", "v", "out")}
    lse = None if call.lse is None else put(call.lse)
    mask = copy.copy(call.mask)
    if mask is not None:
        object.__setattr__(mask, "bits", put(mask.bits))
        mask.__dict__.pop("_tiles", None)
    bounds = None if call.bounds is None else (put(call.bounds[0]), put(call.bounds[1]))
    scales = tuple(None if x is None else put(x) for x in call.scales) if call.fp8 else call.scales
    with patch.object(device, "multiprocessors", lambda: 1):
        attention_launch.forward(HOST, replace(call, **arrays, lse=lse, mask=mask, bounds=bounds, scales=scales))
    call.out[...] = arrays["out"]
    if lse is not None:
        call.lse[...] = lse


class Kernel:
    """What `jit.load` returns: called with a grid, a number of threads and arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __call__(self, grid: tuple[int, ...], threads: tuple[int], args: tuple[Any, ...], shared_mem: int = 0) -> None:
        held = [self._bytes(x) for x in args]
        places = (ctypes.c_void_p * len(held))(*(x.ctypes.data for x in held))
        self._library.emulate(places, *(*grid, 1, 1)[:3], threads[0], shared_mem)

    @staticmethod
    def _bytes(x: Any) -> Array:
        """An argument as it lies in memory: an array is a pointer, a struct or a number itself."""
        is_array = isinstance(x, np.ndarray) and x.ndim > 0 and x.dtype.names is None
        return put(np.frombuffer(np.uint64(x.ctypes.data) if is_array else x.tobytes(), np.uint8))


#: Headers that are exchanged for those of the emulator.
_OTHERS = {"tma.cuh": "emulated_tma.h", "wgmma.cuh": "emulated_wgmma.h", "mma.cuh": "emulated_mma.h"}
_ASSEMBLY = re.compile(r"\basm(?: volatile)?\(")
#: Of instructions with several lines: what is in them, and the function that stands for them.
_SEVERAL = {
    "e4m3x2": "pack_fp8",
    "cvt.f32.f16 %0, low": "low_half",
    "cvt.f32.f16 %0, high": "high_half",
    "tid.x": "thread_number",
    "cp.async.cg.shared.global [%1], [%2], 16, %3": "copy_some_if",
    "cp.async.cg.shared.global [%1], [%2], 16;": "copy_if",
    "cp.async.ca.shared.global [%1], [%2], %3": "copy_if",
    "cp.async.commit_group": "commit_copies",
    "cp.async.wait_group": "wait_for_copies",
    "ld.global.nc.v2.f64": "read_two",
}


def _parts(text: str, separator: str) -> list[str]:
    """A text cut at a separator outside of strings and parentheses."""
    parts, depth, quoted = [""], 0, False
    for i, letter in enumerate(text):
        if letter == '"' and text[i - 1 : i] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += {"(": 1, ")": -1}.get(letter, 0)
            if letter == separator and depth == 0:
                parts.append("")
                continue
        parts[-1] += letter
    return [part.strip() for part in parts]


def _call(inside: str) -> str:
    """The function with the name of an instruction, its results and operands as arguments."""
    template, *operands = [*_parts(inside.replace("::", ": :"), ":"), "", ""][:3]
    said = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', template))
    if not said:
        return ""
    name = next((f for part, f in _SEVERAL.items() if part in said), said.split()[0].replace(".", "_"))
    values = [
        re.sub(r'^"[=+&]*[a-z]"\((.*)\)$', r"\1", x, flags=re.S) for part in operands for x in _parts(part, ",") if x
    ]
    return f"emulator::{name}({', '.join(values)})"


def _without_assembly(text: str) -> str:
    """Instructions become calls of functions; those that say nothing to a CPU go."""
    text = text.replace("extern __shared__ __align__(1024) u8 memory[];", "u8* memory = emulator::shared;")
    out, at = "", 0
    for found in _ASSEMBLY.finditer(text):
        end, depth, quoted = found.end(), 1, False
        while depth:
            if text[end] == '"':
                quoted = not quoted
            depth += 0 if quoted else {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        out += text[at : found.start()] + _call(text[found.end() : end - 1])
        at = end
    return out + text[at:]


def _sources(source: str, folder: Path) -> None:
    """A kernel and its headers as the emulator wants them."""
    for name, text in gather(source).items():
        other = _OTHERS.get(Path(name).name)
        text = (HERE / other).read_text() if other else _without_assembly(text)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


@cache
def load(spec: KernelSpec, folder: Path) -> Kernel:
    """The kernel of a spec, compiled into that folder."""
    assert COMPILER is not None
    text = "\n".join(
        [
            '#include "emulator.h"',
            f'#include "{spec.source}"',
            'extern "C" void emulate(void** arguments, unsigned x, unsigned y, unsigned z, unsigned threads,',
            "                        unsigned bytes) {",
            f"  emulator::launch({spec.entry}, arguments, {{x, y, z}}, threads, bytes);",
            "}\n",
        ]
    )
    _sources(spec.source, folder)
    name = hashlib.sha256(repr(spec).encode()).hexdigest()[:16]
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(text)
    defines = [f"-D{key}={value}" for key, value in spec.all_defines()]
    # Tensor cores are worked out element by element, which wants some optimization.
    level = "-O1" if {"wgmma.cuh", "mma_tiles.cuh"} & {Path(name).name for name in gather(spec.source)} else "-O0"
    command = [COMPILER, "-std=c++20", level, "-w", "-fPIC", "-shared", "-pthread", f"-I{folder}", f"-I{HERE}"]
    subprocess.run([*command, *defines, str(source), "-o", str(library)], check=True)
    return Kernel(ctypes.CDLL(str(library)))


def encode(
    pointer: int, dtype: str, dims: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], **how: Any
) -> np.ndarray[Any, Any]:
    """A tensor map as emulated_tma.h reads it."""
    tensor_map._check(pointer, dtype, tuple(dims), tuple(strides), tuple(box), how.get("swizzle", "none"), "256B")
    item = tensor_map.DTYPES[dtype][1]
    more = 4 - len(dims)
    words = [item, {"none": 0, "32B": 32, "64B": 64, "128B": 128}[how.get("swizzle", "none")]]
    words += [*dims, *[1] * more, *box, *[1] * more]
    packed = np.uint64(pointer).tobytes() + np.array(words, np.uint32).tobytes()
    packed += np.array([*strides, *[0] * more], np.uint64).tobytes()
    return np.frombuffer(packed.ljust(128, b"\0"), np.uint8)
