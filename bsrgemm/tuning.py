"""Which kernel serves which problem, and with which constants: pure functions, no device, no array.

A config is a small frozen dataclass; `spec()` is what the loader compiles. Every config that can be returned for
the dtypes of bsrgemm is listed by `every_config`, so that all of them can be compiled ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .dtypes import BFLOAT16, BOOL, DEVICE_DTYPES, HALF_DTYPES, accumulator_dtype, result_dtype
from .jit import KernelSpec

_CUDA_NAMES = {
    BOOL: "boolean",
    np.dtype("i1"): "i8",
    np.dtype("u1"): "u8",
    np.dtype("i2"): "i16",
    np.dtype("u2"): "u16",
    np.dtype("i4"): "i32",
    np.dtype("u4"): "u32",
    np.dtype("i8"): "i64",
    np.dtype("u8"): "u64",
    np.dtype("f2"): "f16",
    BFLOAT16: "bf16",
    np.dtype("f4"): "f32",
    np.dtype("f8"): "f64",
    np.dtype("c8"): "c64",
    np.dtype("c16"): "c128",
}

OPERATIONS = {"add": "kAdd", "maximum": "kMaximum", "minimum": "kMinimum", "fmax": "kFmax", "fmin": "kFmin"}

#: The largest grid along x, and along y and z.
_MAX_X, _MAX_YZ = 2**31 - 1, 65535
_POWERS = (1, 2, 4, 8, 16, 32, 64, 128)

#: Block sides up to this are compiled into the SpMV kernel: the division by them is then a multiplication.
_SMALL_BLOCK = 8


def element(dtype: np.dtype[Any]) -> str:
    """The name of a dtype in cuda/types.cuh."""
    return _CUDA_NAMES[dtype]


@lru_cache(maxsize=256)
def accumulator(dtype: np.dtype[Any]) -> tuple[str, np.dtype[Any]]:
    """What sums of `dtype` are kept in: its name in cuda/types.cuh and a NumPy dtype of the same bytes.

    Integers are summed modulo 2^32 or 2^64, whose low bits are those of the narrower type.
    """
    dtype = accumulator_dtype(dtype)
    if dtype.kind in "iu":
        dtype = np.dtype(np.uint32 if dtype.itemsize <= 4 else np.uint64)
    return element(dtype), dtype


@dataclass(frozen=True)
class Types:
    """Element types of the two operands, the result and the sums, and the index type, by their CUDA names."""

    a: str
    b: str
    c: str
    acc: str
    index: str = "i32"

    def defines(self) -> tuple[tuple[str, str], ...]:
        return (
            ("ELEMENT_A", self.a),
            ("ELEMENT_B", self.b),
            ("ELEMENT_C", self.c),
            ("ACCUMULATOR", self.acc),
            ("INDEX", self.index),
        )


@lru_cache(maxsize=4096)
def types(a: np.dtype[Any], b: np.dtype[Any], c: np.dtype[Any], acc: np.dtype[Any], index: np.dtype[Any]) -> Types:
    return Types(element(a), element(b), element(c), accumulator(acc)[0], element(index))


@dataclass(frozen=True)
class GemmSimt:
    """``A @ B`` on the plain cores: any block, any dtype, any strides."""

    types: Types
    rows: int
    cols: int
    lanes: int

    threads = 128

    def spec(self) -> KernelSpec:
        shape = (("ROWS", self.rows), ("COLS", self.cols), ("LANES", self.lanes))
        return KernelSpec("gemm_simt.cu", "gemm_simt", (*self.types.defines(), *shape))

    def grid(self, block_rows: int, R: int, N: int) -> tuple[int, int, int]:
        """Block rows, columns and rows of a block along x, y and z; the kernel loops over what does not fit."""
        return (
            min(_MAX_X, -(-block_rows // (self.threads // self.lanes))),
            min(_MAX_YZ, -(-N // (self.lanes * self.cols))),
            min(_MAX_YZ, -(-R // self.rows)),
        )


@dataclass(frozen=True)
class GemmSm90:
    """``A @ B`` on Hopper's tensor cores: 16-bit floats, blocks of 64 n rows and 16 n columns."""

    types: Types
    tile_m: int
    tail: int
    b_transposed: bool
    tma_store: bool

    threads = 384
    tile_n = 256
    tile_k = 64
    stages = 4

    def spec(self) -> KernelSpec:
        return KernelSpec(
            "gemm_sm90.cu",
            "gemm_sm90",
            (
                ("ELEMENT_A", self.types.a),
                ("ELEMENT_C", self.types.c),
                ("INDEX", self.types.index),
                ("MMA_TYPE", self.types.a),
                ("TILE_M", self.tile_m),
                ("TAIL", self.tail),
                ("B_TRANSPOSED", int(self.b_transposed)),
                ("TMA_STORE", int(self.tma_store)),
                ("STAGES", self.stages),
            ),
        )

    @property
    def shared_bytes(self) -> int:
        """The struct Shared of the kernel, and what aligns it: 230,528 of 232,448 bytes at most."""
        stage = 2 * self.tile_k * (self.tile_m + self.tile_n)
        slabs = 4 if self.tma_store else 1
        return 1024 + self.stages * (stage + 16) + slabs * 64 * 64 * 2 + 64

    def group(self, K: int) -> int:
        """Column tiles walked together: as many panels of B (K x 256) as fit 20 MB of the L2, at most 4.

        8 cost 3-7 % at K = 8192 and 16 cost 20 %.
        """
        return max(1, min(4, (20 << 20) // (K * self.tile_n * 2)))

    def ctas(self, block_rows: int, R: int, N: int, multiprocessors: int) -> int:
        """As few as finish in the same number of rounds as one per multiprocessor: the rest would only draw power."""
        tiles = block_rows * (R // self.tile_m) * -(-N // self.tile_n)
        rounds = -(-tiles // multiprocessors)
        return -(-tiles // rounds)


@dataclass(frozen=True)
class Spmv:
    """``A @ x``: lanes share a block row."""

    types: Types
    lanes: int
    rows: int
    block_r: int
    block_c: int

    threads = 128

    def spec(self) -> KernelSpec:
        shape = (
            ("LANES", self.lanes),
            ("ROWS", self.rows),
            ("BLOCK_R", self.block_r),
            ("BLOCK_C", self.block_c),
        )
        return KernelSpec("spmv.cu", "spmv", (*self.types.defines(), *shape))

    def grid(self, block_rows: int, R: int, N: int) -> tuple[int]:
        """Block rows along x."""
        return (min(_MAX_X, -(-block_rows // (self.threads // self.lanes))),)


@dataclass(frozen=True)
class Pairs:
    """The numeric half of ``BSR @ BSR``."""

    types: Types
    lanes: int

    threads = 128

    def spec(self) -> KernelSpec:
        return KernelSpec("pairs.cu", "pairs", (*self.types.defines(), ("LANES", self.lanes)))

    def grid(self, segments: int) -> tuple[int]:
        return (min(_MAX_X, -(-segments // (self.threads // self.lanes))),)


@dataclass(frozen=True)
class Segment:
    """Reductions over segments of rows."""

    element: str
    acc: str
    operation: str
    lanes: int
    columns: int

    threads = 128

    def spec(self) -> KernelSpec:
        return KernelSpec(
            "segment.cu",
            "segment",
            (
                ("ELEMENT_A", self.element),
                ("ACCUMULATOR", self.acc),
                ("OPERATION", self.operation),
                ("LANES", self.lanes),
                ("COLUMNS", self.columns),
            ),
        )

    def grid(self, segments: int) -> tuple[int]:
        return (min(_MAX_X, -(-segments // (self.threads // (self.lanes * self.columns)))),)


@dataclass(frozen=True)
class Expand:
    """Rows of the entries of a compressed index."""

    index: str

    threads = 128
    entries = 8

    def spec(self) -> KernelSpec:
        return KernelSpec("expand.cu", "expand", (("INDEX", self.index),))

    def grid(self, entries: int) -> tuple[int]:
        return (min(_MAX_X, -(-entries // (self.threads * self.entries))),)


Config = GemmSimt | GemmSm90 | Spmv | Pairs | Segment | Expand


def _floor_power_of_two(n: int, most: int) -> int:
    return 1 << (max(1, min(n, most)).bit_length() - 1)


def _ceil_power_of_two(n: int, most: int) -> int:
    return min(most, 1 << (max(1, n) - 1).bit_length())


#: Below this many columns most of a 256-wide tile would be empty.
_SM90_COLUMNS = 16


def sm90_serves(arch: str, names: Types, block_rows: int, R: int, C: int, N: int) -> bool:
    """Can gemm_sm90 do this product, given that its operands lie well? Tiles are counted in 31 bits."""
    return (
        arch == "sm_90a"
        and block_rows * R * N < 1 << 44
        and names.a == names.b
        and names.a in ("f16", "bf16")
        and names.c in (names.a, "f32")
        and names.acc == "f32"
        and R % 64 == 0
        and C % 16 == 0
        and N >= _SM90_COLUMNS
    )


@lru_cache(maxsize=1024)
def gemm_sm90(names: Types, R: int, C: int, b_transposed: bool, tma_store: bool) -> GemmSm90:
    """Two warpgroups over 128 rows where a block has them, otherwise side by side over 64."""
    return GemmSm90(names, 128 if R % 128 == 0 else 64, C % 64, b_transposed, tma_store)


@lru_cache(maxsize=4096)
def spmm(names: Types, R: int, C: int, N: int) -> GemmSimt | Spmv:
    """The kernel for a product with a dense matrix of N columns."""
    if N == 1:
        return spmv(names, R, C)
    lanes = _ceil_power_of_two(N, 32)
    wide = names.acc in ("f64", "u64", "c64", "c128")
    rows = _floor_power_of_two(R, 4 if wide else 8)
    # Each B value serves `rows` products, each A value `cols`. 8 x 4 sums fill 32 registers, 64-bit ones 4 x 4.
    cols = _floor_power_of_two(-(-N // lanes), 4) if lanes == 32 and names.acc != "c128" else 1
    return GemmSimt(names, rows, cols, lanes)


@lru_cache(maxsize=4096)
def spmv(names: Types, R: int, C: int) -> Spmv:
    """The kernel for a product with one vector.

    A lane keeps `rows` sums, of which 8 are enough to read whole small blocks. Narrow blocks leave little to share
    within a row, so that 8 lanes a row keep more rows in flight; from 16 columns on a warp has work in every block.
    """
    small = R <= _SMALL_BLOCK and C <= _SMALL_BLOCK
    lanes = 8 if C <= 2 else 16 if C < 16 else 32
    rows = R if small else 4 if names.acc == "c128" else 8
    return Spmv(names, lanes, rows, R if small else 0, C if small else 0)


@lru_cache(maxsize=1024)
def pairs(names: Types, size: int) -> Pairs:
    """The kernel for result blocks of `size` elements: a thread for each, up to a CTA a block."""
    return Pairs(names, _ceil_power_of_two(size, 128))


@lru_cache(maxsize=1024)
def segment(dtype: np.dtype[Any], operation: str, average: int, width: int) -> Segment:
    """The kernel for segments of `average` rows of `width`: a warp for long ones, a thread for short ones."""
    lanes = 32 if average >= 32 else 1
    columns = 1 if lanes == 32 else _ceil_power_of_two(width, 32)
    acc = accumulator(dtype)[0] if operation == "add" else _ordered(dtype)
    return Segment(element(dtype), acc, OPERATIONS[operation], lanes, columns)


def _ordered(dtype: np.dtype[Any]) -> str:
    """A type in which the values of `dtype` are compared: its own sign must survive."""
    return "f32" if accumulator_dtype(dtype) != dtype else element(dtype)


def runs_on(config: Config, arch: str) -> bool:
    """Can this kernel be compiled for `arch`?"""
    return arch == "sm_90a" or not isinstance(config, GemmSm90)


def _sm90_configs(dtype: np.dtype[Any]) -> Iterator[GemmSm90]:
    float32 = np.dtype(np.float32)
    for index in (np.dtype(np.int32), np.dtype(np.int64)):
        for c, tma_store in ((dtype, True), (dtype, False), (float32, False)):
            names = types(dtype, dtype, c, float32, index)
            for R in (64, 128):
                for tail in (0, 16, 32, 48):
                    for b_transposed in (False, True):
                        yield gemm_sm90(names, R, tail, b_transposed, tma_store)


def every_config(dtypes: tuple[np.dtype[Any], ...] = DEVICE_DTYPES) -> Iterator[Config]:
    """All configs for operands of equal dtype, promoted results and both index types.

    Mixed dtypes and `out_dtype` name further element types for the same kernels; they are compiled when met.
    """
    int32, int64 = np.dtype(np.int32), np.dtype(np.int64)
    for index in (int32, int64):
        yield Expand(element(index))
    for dtype in dtypes:
        result = result_dtype(dtype, dtype)
        for index in (int32, int64):
            names = types(dtype, dtype, result, accumulator_dtype(result), index)
            shapes = {spmm(names, R, 1, N) for R in (1, 2, 4, 8) for N in (2, 4, 8, 16, 32, 64, 128)}
            yield from sorted(shapes, key=repr)
            sides = range(1, _SMALL_BLOCK + 1)
            blocks = {spmv(names, R, C) for R in (*sides, 9) for C in (*sides, 9, 16)}
            yield from sorted(blocks, key=repr)
        if dtype in HALF_DTYPES:
            yield from _sm90_configs(dtype)
        names = types(dtype, dtype, result, accumulator_dtype(result), int64)
        for lanes in _POWERS:
            yield pairs(names, lanes)
        for operation in OPERATIONS:
            for columns in _POWERS[:6]:
                yield segment(dtype, operation, 1, columns)
            yield segment(dtype, operation, 32, 1)
