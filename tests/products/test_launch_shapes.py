"""What products and attention start: the grid, threads, shared memory, and each field of the argument by its name.

launches.txt has a line for each kernel that a call starts on an imagined card of two multiprocessors. A launch that was
changed on purpose writes it anew: ``python -m tests.products.test_launch_shapes``.
"""

from __future__ import annotations

import re
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm import BlockMask, KVCache
from bsrgemm._attention import decode_launch
from bsrgemm._attention import launch as attention_launch
from bsrgemm._attention.call import AttentionCall, DecodeCall
from bsrgemm._backend import array_kernels
from bsrgemm._backend.base import Blocks
from bsrgemm._backend.cupy_backend import CupyBackend
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._kernels import device, jit, launching, workspace
from bsrgemm._kernels.sources import cuda_root
from bsrgemm._kernels.structs import Complex, Struct, TensorMap
from bsrgemm._products import block_products, configs, launch, row_matching, spgemm_pattern, work_list_launch
from bsrgemm._products import cuda as products_cuda
from bsrgemm._products.call import ProductCall
from bsrgemm._products.work_list import Pattern
from bsrgemm.dtypes import BFLOAT16, accumulator_dtype

from .. import written_lists
from ..emulator import emulator
from ..emulator.emulator import Array, put

PATH = Path(__file__).with_name("launches.txt")
F16, F32, F64, U8 = (np.dtype(x) for x in ("float16", "float32", "float64", "uint8"))


class Started:
    """Keeps each launch as a line; pointers are written as the name of the array that lies there."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.places: dict[int, str] = {}

    def name(self, **arrays: Any) -> None:
        self.places = {x.data.ptr: name for name, x in arrays.items() if x is not None}

    def load(self, spec: Any, arch: str) -> Any:
        return Kernel(self, spec)

    def pointer(self, address: int) -> str:
        return self.places.get(address, "-" if address else "0")

    def fields(self, layout: Struct, packed: bytes, first: int = 0) -> Iterator[str]:
        for name, kind in layout.fields:
            at = first + layout.offsets[name]
            if isinstance(kind, Struct):
                yield f"{name}({' '.join(self.fields(kind, packed, at))})"
            elif isinstance(kind, TensorMap):
                address, *words = struct.unpack_from("=Q10I3Q", packed, at)
                yield f"{name}[{self.pointer(address)} {' '.join(map(str, words))}]" if any(words) else f"{name}[]"
            elif isinstance(kind, Complex):
                yield f"{name}={struct.unpack_from('=2' + kind.part, packed, at)}"
            elif kind == "P":
                yield f"{name}={self.pointer(struct.unpack_from('=Q', packed, at)[0])}"
            else:
                yield f"{name}={struct.unpack_from('=' + kind, packed, at)[0]:.9g}"


class Kernel:
    """Starts nothing, and writes down its launch."""

    max_dynamic_shared_size_bytes = 0

    def __init__(self, started: Started, spec: Any) -> None:
        self.started, self.spec = started, spec

    def __call__(self, grid: Any, threads: Any, args: tuple[Any, ...], shared_mem: int = 0) -> None:
        assert shared_mem == self.max_dynamic_shared_size_bytes or shared_mem <= 48 << 10
        words = [self.spec.entry, str(grid), str(threads), str(shared_mem)]
        layouts = iter(self.spec.structs)
        for x in args:
            if hasattr(x, "packed"):
                words += self.started.fields(next(layouts), x.tobytes())
            else:
                words.append(f"{x.dtype}{list(x.shape)}" if isinstance(x, np.ndarray) else f"{x.dtype} {x}")
        self.started.lines.append(" ".join(words))


@contextmanager
def card(arch: str = "sm_90a") -> Iterator[Started]:
    started = Started()
    counters = put(np.zeros(1 << 12, np.int32))
    asked: list[str] = started.lines

    def given(count: int) -> Array:
        asked.append(f"counters {count}")
        return counters

    def scratch(size: int, count: int) -> tuple[Array | None, int, int]:
        memory = put(np.empty(size, np.uint8)) if size else None
        if memory is not None:
            asked.append(f"scratch {size} bytes")
        return memory, 0 if memory is None else memory.data.ptr, given(count).data.ptr if count else 0

    columns = SimpleNamespace(
        empty=lambda *args: put(np.empty(*args)),
        ascontiguousarray=lambda x: put(np.ascontiguousarray(x)),
        asfortranarray=lambda x: put(np.ascontiguousarray(x.T)).T,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        emulator.emulated(Path(folder), arch=arch),
        patch.object(jit, "load", started.load),
        patch.multiple(work_list_launch, merged=lambda *args: None, whole=lambda *args: None),
        patch.object(row_matching, "matched", lambda *args: None),
        patch.object(workspace, "counters", given),
        patch.object(workspace, "scratch", scratch),
        patch.object(attention_launch, "counters", given),
        patch.object(block_products, "counters", given),
        patch.object(block_products, "cupy", columns),
        patch.object(decode_launch, "_templates", {}),
    ):
        yield started


# ------------------------------------------------------------------------------------------------ products
class Matrix:
    """Three block rows of two blocks each, and four block columns; or two full block rows of `full` blocks."""

    def __init__(self, R: int, K: int, dtype: Any = F16, full: int = 0) -> None:
        indices, indptr = ([0, 1, 0, 3, 1, 2], [0, 2, 4, 6]) if not full else ([*range(full)] * 2, [0, full, 2 * full])
        self.data = put(np.ones((len(indices), R, K), dtype))
        self.indices, self.indptr = (put(np.array(x, np.int32)) for x in (indices, indptr))
        self._shape = ((len(indptr) - 1) * R, (full or 4) * K)
        self._backend = HOST


def dense(rows: int, N: int, dtype: Any, order: str = "C", batches: int = 1) -> Array:
    shape = (batches, rows, N) if batches > 1 else (rows, N)
    x = put(np.ones(shape[:-2] + shape[:-3:-1] if order == "F" else shape, dtype))
    return x.swapaxes(-1, -2) if order == "F" else x


#: Rows that are cut into pieces: by Hopper's tensor cores, and by the kernel for small blocks and one column.
LONG = (("f2", (128, 64), 64, 60), ("f4", (3, 2), 1, 9000), ("f8", (3, 2), 1, 9000), ("f2", (3, 2), 1, 9000))
PRODUCTS: dict[str, dict[str, Any]] = {
    **{f"{d} {n}": {"dtype": d, "block": (n, n)} for d, n in product(("f2", "f4", "f8"), (3, 16, 64, 128))},
    **{f"f2 16 x 48, {N} columns": {"block": (16, 48), "N": N} for N in (1, 2, 64, 65, 600)},
    **{f"f8 3 x 2, {N} columns": {"dtype": "f8", "block": (3, 2), "N": N} for N in (1, 2, 64, 200)},
    **{f"f4 20 x 9, {N} columns": {"dtype": "f4", "block": (20, 9), "N": N} for N in (1, 33, 200)},
    "transposed": {"block": (64, 128), "transposed": True},
    "transposed small blocks": {"block": (3, 5), "dtype": "f4", "transposed": True, "N": 1},
    "batches": {"batches": 3},
    "batches of small blocks": {"block": (5, 5), "dtype": "f8", "batches": 3, "N": 16},
    "orders": {"b": "F", "c": "F"},
    "orders of a high block": {"b": "F", "c": "F", "block": (128, 80), "N": 520, "batches": 2},
    "beta": {"beta": 2, "alpha": -3},
    "complex": {"dtype": "c16", "block": (5, 5), "alpha": 1 - 2j, "beta": 3j},
    "bytes": {"dtype": "i1", "out": "i4", "block": (32, 32)},
    "fp8": {"dtype": "u1", "out": "f2", "block": (64, 96), "b": "F", "fp8": True},
    "tf32": {"dtype": "f4", "b": "F", "tf32": True},
    **{f"long rows {d} {n}": {"dtype": d, "block": n, "N": N, "full": k} for d, n, N, k in LONG},
}


def started_products(started: Started, how: dict[str, Any]) -> None:
    R, K = how.get("block", (64, 64))
    dtype = np.dtype(how.get("dtype", "f2"))
    N, batches, transposed = how.get("N", 100), how.get("batches", 1), "transposed" in how
    A = Matrix(R, K, dtype, how.get("full", 0))
    if N == 100 and how.get("b", "C") == "C":
        N = 96
    rows, cols = A._shape[::-1] if transposed else A._shape
    B = dense(cols, N, dtype, how.get("b", "C"), batches)
    out = dense(rows, N, np.dtype(how.get("out", dtype)), how.get("c", "C"), batches)
    started.name(data=A.data, B=B, out=out)
    options = {name: how[name] for name in ("alpha", "beta", "transposed", "fp8", "tf32") if name in how}
    call = ProductCall(A, B, out, accumulator_dtype(out.dtype), **{"may_copy": False, **options})  # type: ignore[arg-type]
    launch.product(call)


def products() -> Iterator[tuple[str, str]]:
    for arch, (name, how) in product(("sm_75", "sm_80", "sm_90a"), PRODUCTS.items()):
        with card(arch) as started:
            started_products(started, how)
            yield f"{arch} {name}", " ; ".join(started.lines)
    with card() as started, patch.object(device, "multiprocessors", lambda: 132):
        for name in ("f2 64", "f8 16", "f2 16 x 48, 600 columns", "f8 3 x 2, 1 columns", "long rows f2 (128, 64)"):
            started.lines.clear()
            started_products(started, PRODUCTS[name])
            yield f"132 multiprocessors {name}", " ; ".join(started.lines)
    with card() as started, patch.object(launch, "_KEPT_BYTES", 6 * 64 * 64 * 2 - 1):
        started_products(started, {})
        yield "A that the L2 cannot keep", " ; ".join(started.lines)


# ------------------------------------------------------------------------------------------------ blocks of products
def blocks() -> Iterator[tuple[str, str]]:
    starts = put(np.array([0, 3, 5], np.int64))
    ia, ib = (put(np.array(x, np.int64)) for x in ([0, 1, 2, 3, 4, 0, 1], [4, 3, 2, 1, 0, 0, 1]))
    for arch, dtype, (R, K, N) in product(
        ("sm_80", "sm_90a"), (F16, F32, F64), ((64, 64, 64), (128, 72, 128), (16, 8, 48), (9, 5, 4))
    ):
        with card(arch) as started:
            a, b = put(np.ones((5, R, K), dtype)), put(np.ones((6, K, N), dtype))
            started.name(a=a, b=b, ia=ia, ib=ib, starts=starts)
            products_cuda.CudaProducts(HOST).pair_products(a, ia, b, ib, starts, dtype)
            yield f"pairs {arch} {dtype} {R} {K} {N}", " ; ".join(started.lines)
    with card() as started, patch.object(device, "l2_bytes", lambda: 1 << 10):
        a, b = put(np.ones((40, 64, 64), F16)), put(np.ones((6, 64, 64), F16))
        order = put(np.arange(40))
        for rows in (0, 15, 16, 40):
            block_products.pair_products(a, order, b, order, order, F32, rows)
        yield "pairs in strips", " ; ".join(started.lines)
    indices, indptr = put(np.array([0, 2, 1], np.int32)), put(np.array([0, 2, 3], np.int32))
    for arch, dtype, (R, K, N), order, tf32 in product(
        ("sm_80", "sm_90a"), (F16, F32), ((64, 40, 64), (16, 72, 16), (128, 64, 32)), ("C", "F"), (False, True)
    ):
        with card(arch) as started:
            X, Y = dense(2 * R, K, dtype), dense(K, 3 * N, dtype, order)
            started.name(X=X, Y=Y, indices=indices, indptr=indptr)
            products_cuda.CudaProducts(HOST).sampled(X, Y, indices, indptr, (R, N), dtype, tf32)
            yield f"sampled {arch} {dtype} {R} {K} {N} {order} {tf32}", " ; ".join(started.lines)


# ------------------------------------------------------------------------------------------------ attention and decode
def placed(mask: BlockMask) -> BlockMask:
    object.__setattr__(mask, "bits", put(mask.bits))
    return mask


def attending(shape: tuple[int, ...] = (2, 4, 200, 64), **changes: Any) -> AttentionCall:
    batch, heads, queries, D = shape
    dtype, out = changes.pop("dtype", F16), changes.pop("out_dtype", None)
    kv_heads, keys, D_v = changes.pop("kv_heads", heads), changes.pop("keys", queries), changes.pop("value_dim", D)
    pitch = changes.pop("pitch", 0)
    q = put(np.ones((batch, heads, queries, D + pitch), dtype))[..., :D]
    k, v = (put(np.ones((batch, kv_heads, keys, d + pitch), dtype))[..., :d] for d in (D, D_v))
    o = put(np.ones((batch, heads, queries, D_v), out or dtype))
    options = {"lse": None, "acc": F64 if dtype == F64 else F32, "scale": 0.125, "softcap": None}
    return AttentionCall(
        **{"q": q, "k": k, "v": v, "out": o, **options, "left": 2**30, "right": 2**30, "bottom_right": True, **changes}
    )


def bounds() -> tuple[Array, Array]:
    return put(np.array([0, 60, 60, 200], np.int32)), put(np.array([0, 10, 90, 200], np.int32))


ATTENTION: dict[str, Callable[[], AttentionCall]] = {
    "usual": attending,
    "long": lambda: attending((2, 8, 8448, 64)),
    "many heads": lambda: attending((3, 8, 300, 128), kv_heads=2, keys=9000, value_dim=80),
    "wide heads": lambda: attending((1, 2, 300, 192)),
    "float64": lambda: attending(dtype=F64),
    "bfloat16": lambda: attending(dtype=BFLOAT16, out_dtype=F32),
    "causal": lambda: attending(right=0, softcap=20.0, bottom_right=False),
    "band": lambda: attending(left=5, right=3, scale=-1.0, lse=put(np.ones((2, 4, 200), F32))),
    "odd rows": lambda: attending((2, 4, 200, 60), pitch=1),
    "aligned rows": lambda: attending((2, 4, 200, 60), pitch=4),
    "one head": lambda: attending((1, 1, 1, 64), keys=500),
    "causal mask": lambda: attending(mask=placed(BlockMask.causal(200, block=128, device="cpu"))),
    "fine mask": lambda: attending(mask=placed(BlockMask.random(200, block=32, per_row=2, device="cpu", seed=1))),
    "half of a mask": lambda: attending(mask=placed(BlockMask.random(200, block=64, per_row=2, device="cpu", seed=1))),
    "mask of heads": lambda: attending(
        mask=placed(BlockMask.random(200, block=128, per_row=1, heads=(2, 2), device="cpu", seed=2))
    ),
    "sequences": lambda: attending((1, 4, 200, 64), bounds=bounds()),
    "sequences of fp8": lambda: attending((1, 4, 200, 64), dtype=U8, out_dtype=F16, fp8=True, bounds=bounds()),
    "fp8": lambda: attending(
        (2, 4, 300, 96),
        dtype=U8,
        out_dtype=F32,
        fp8=True,
        value_scale=2.5,
        scales=(put(np.ones(8, F32)), None, put(np.ones(8, F32))),
    ),
    "fp8 in odd rows": lambda: attending((2, 4, 300, 96), dtype=U8, out_dtype=F16, fp8=True, pitch=5),
    "no keys": lambda: attending(keys=0, lse=put(np.ones((2, 4, 200), F32))),
    "no queries": lambda: attending((2, 4, 0, 64), keys=5),
}


def attention() -> Iterator[tuple[str, str]]:
    for arch, (name, make) in product(("sm_75", "sm_80", "sm_90a"), ATTENTION.items()):
        with card(arch) as started:
            call = make()
            started.name(**{x: getattr(call, x) for x in ("q", "k", "v", "out", "lse")})
            attention_launch.forward(HOST, call)
            yield f"{arch} {name}", " ; ".join(started.lines)
            if name == "no keys":
                assert not np.asarray(call.out).any() and np.isneginf(np.asarray(call.lse)).all()
    with card() as started, patch.object(device, "multiprocessors", lambda: 132):
        for name in ("usual", "long", "fine mask"):
            started.lines.clear()
            attention_launch.forward(HOST, ATTENTION[name]())
            yield f"132 multiprocessors {name}", " ; ".join(started.lines)


def cache_of(tokens: int = 500, batch: int = 2, D: int = 64, D_v: int = 64, **how: Any) -> KVCache:
    cache = KVCache(batch, 2, 4096, D, value_dim=D_v, dtype="float16", device="cpu", **how)
    for name in ("k", "v", "_device_lengths", "table"):
        if getattr(cache, name) is not None:
            setattr(cache, name, put(getattr(cache, name)))
    cache._lengths[:] = tokens
    cache._longest, cache._total = tokens, batch * tokens
    return cache


def decoding(cache: KVCache, heads: int = 4, queries: int = 1, **changes: Any) -> DecodeCall:
    q = put(np.ones((cache.batch, heads, queries, cache.head_dim), F16))
    out = put(np.ones((cache.batch, heads, queries, cache.value_dim), F16))
    options = {"lse": None, "scale": 0.1, "softcap": None, "left": 4096}
    return DecodeCall(**{"q": q, "cache": cache, "out": out, **options, **changes})


def block_list(*shape: int) -> Array:
    return put(np.zeros(shape, np.int32))


DECODE: dict[str, Callable[[], DecodeCall]] = {
    "usual": lambda: decoding(cache_of()),
    "short": lambda: decoding(cache_of(40)),
    "long": lambda: decoding(cache_of(4000, D=128, D_v=96)),
    "queries": lambda: decoding(cache_of(), heads=8, queries=5),
    "window": lambda: decoding(cache_of(4000), left=300, queries=3),
    "softcap": lambda: decoding(cache_of(), softcap=3.0, lse=put(np.ones((2, 4, 1), F32))),
    "tiny softcap": lambda: decoding(cache_of(), softcap=1e-40, scale=1e39),
    "blocks": lambda: decoding(cache_of(), blocks=block_list(2, 1, 7), block=64),
    "blocks of heads": lambda: decoding(cache_of(), blocks=block_list(1, 2, 30), block=32),
    "pages": lambda: decoding(cache_of(page=64)),
    "sequences": lambda: decoding(cache_of(batch=5)),
}


def decode() -> Iterator[tuple[str, str]]:
    for multiprocessors, (name, make) in product((2, 132), DECODE.items()):
        with card() as started, patch.object(device, "multiprocessors", lambda n=multiprocessors: n):
            call = make()
            cache = call.cache
            more = {"lengths": cache._device_lengths, "table": cache.table, "blocks": call.blocks, "lse": call.lse}
            started.name(q=call.q, out=call.out, k=cache.k, v=cache.v, **more)
            decode_launch.decode(call)
            yield f"{multiprocessors} {name}", " ; ".join(started.lines)


# ------------------------------------------------------------------------------------------------ lists
def matching() -> Iterator[tuple[str, str]]:
    """Rounds in which row tiles are joined, and where nothing is gained by it."""
    matched = row_matching.matched
    for rows, columns, per_row, per_group in product((1, 3, 10, 1100), (1, 33), (1, 4), (2, 8)):
        with card() as started:
            indices = put(np.arange(2 * rows, dtype=np.int32) % columns)
            pattern = Pattern(indices, put(np.arange(0, 2 * rows + 1, 2, dtype=np.int64)), rows, columns, False)
            found = matched(pattern, per_row, per_group)
            yield f"{rows} {columns} {per_row} {per_group}", f"{found is None} " + " ; ".join(started.lines)
    with card(), patch.object(row_matching, "_MOST_PATTERN_BYTES", 12 * 4):
        for rows in (12, 13):
            indices = put(np.arange(2 * rows, dtype=np.int32) % 32)
            pattern = Pattern(indices, put(np.arange(0, 2 * rows + 1, 2, dtype=np.int32)), rows, 32, False)
            yield f"a table of {rows} words", str(matched(pattern, 1, 4) is None)
    with card():
        none = Pattern(put(np.zeros(0, np.int32)), put(np.zeros(11, np.int32)), 10, 7, False)
        yield "no blocks", str(matched(none, 1, 4))


def listed_at_once(totals: tuple[int, int], cols: int, index: str = "iiii") -> str:
    """The launch that finds all pairs of blocks, if there are said to be so many, and the arrays that are made."""
    made: list[Array] = []

    def empty(*args: Any) -> Array:
        made.append(put(np.full(args[0], 77, *args[1:])))
        return made[-1]

    with card() as started:
        stand_in = SimpleNamespace(empty=empty)

        class Writing(Kernel):
            def __call__(self, *args: Any, **how: Any) -> None:
                self.started.name(lists=made[0], indices=made[1], indptr=made[2])
                super().__call__(*args, **how)
                made[0][:4].view(np.int64)[...] = totals

        with (
            patch.object(spgemm_pattern, "cupy", stand_in),
            patch.object(jit, "load", lambda spec, arch: Writing(started, spec)),
        ):
            listing = spgemm_pattern.begin(*two_patterns(index), cols)
            if listing is None:
                return "None"
            found = listing.finish()
        return " ; ".join([*started.lines, f"{found} of {len(listing.left)} {len(listing.indices)}"])


def two_patterns(index: str) -> tuple[Blocks, Blocks]:
    pointer = np.array([0, 1, 1, 2])
    lists = zip((np.array([0, 1]), pointer, np.array([1, 0]), pointer), index, strict=True)
    arrays = [put(x.astype(d)) for x, d in lists]
    return Blocks(None, *arrays[:2]), Blocks(None, *arrays[2:])


def found_pairs(most: int, cols: int, index: str = "iiii", counts: tuple[int, ...] = (2, 0, 3)) -> str:
    """The launches that find pairs of blocks in steps, if so many are said to be in a row, and the arrays."""
    made: list[Array] = []

    def zeros(*args: Any) -> Array:
        made.append(put(np.zeros(*args)))
        return made[-1]

    with card() as started:
        stand_in = SimpleNamespace(zeros=zeros, empty=lambda *args: put(np.empty(*args)), cumsum=np.cumsum)

        class Writing(Kernel):
            def __call__(self, *args: Any, **how: Any) -> None:
                self.started.name(before=made[0], most=made[0][-1:], count=made[1] if len(made) > 1 else None)
                super().__call__(*args, **how)
                if self.spec.entry == "count_pairs":
                    made[0][1:-1], made[0][-1] = counts, most
                elif self.spec.entry == "list_pairs":
                    made[1][1:] = 1

        with (
            patch.object(spgemm_pattern, "cupy", stand_in),
            patch.object(spgemm_pattern, "_MOST_ROOM", 0),
            patch.object(jit, "load", lambda spec, arch: Writing(started, spec)),
        ):
            found = spgemm_pattern.product_pattern(*two_patterns(index), cols)
        lines = [*started.lines, "None" if found is None else " ".join(f"{x.dtype}{list(x.shape)}" for x in found)]
    return " ; ".join(lines)


def pairs() -> Iterator[tuple[str, str]]:
    """Tables for columns of a row, in shared memory of 96 KiB; and index arrays of several dtypes."""
    for most in (1, 24, 25, 26, 32, 33, 800, 819, 820, 1500, 5000, 6000, 7000):
        yield f"{most} columns in a row", found_pairs(most, 10**6)
    yield "a row of all columns", found_pairs(900, 7)
    for index in ("llll", "liii", "ilii", "iili", "iiil"):
        yield f"index arrays {index}", found_pairs(3, 9, index)
    yield "no pairs", found_pairs(0, 9, counts=(0, 0, 0))
    for most, what in ((5, "pairs"), (6, "pairs that fit"), (9, "columns"), (10, "columns that fit")):
        with patch.object(spgemm_pattern, "_MOST", most):
            yield f"too many {what}", found_pairs(3, 9 if "columns" in what else 3)
    with patch.object(spgemm_pattern, "_MOST", 2):
        yield "too many blocks", found_pairs(3, 1)
    with patch.object(spgemm_pattern, "_MOST", 4):
        yield "too many blocks of neither", found_pairs(3, 1, counts=(1, 0, 1))
    for cols in (1, 32, 33, 2048, 2049):
        yield f"at once, {cols} columns", listed_at_once((2, 2), cols)
    for index in ("llll", "iiil"):
        yield f"at once, index arrays {index}", listed_at_once((2, 2), 9, index)
    for totals in ((4, 4), (0, 0), (5, 4), (4, 5)):
        yield f"at once, {totals} pairs and blocks", listed_at_once(totals, 9)
    for room in (3, 4):
        with patch.object(spgemm_pattern, "_MOST_ROOM", room):
            yield f"at once, memory for {room} pairs", listed_at_once((2, 2), 9)


MERGED, WHOLE = work_list_launch.merged, work_list_launch.whole


def lists() -> Iterator[tuple[str, str]]:
    """The steps that make work lists."""
    for index, transposed, (per_row, per_group), ordered in product(
        "il", (False, True), ((1, 2), (4, 2), (2, 8)), (False, True)
    ):
        with card() as started:
            indices, indptr = (put(np.array(x, index)) for x in ([0, 1, 0, 3, 1, 2], [0, 2, 4, 6]))
            pattern = Pattern(indices, indptr, 3, 4, transposed)
            order = put(np.arange(16, dtype=np.int32)) if ordered else None
            started.name(indices=indices, indptr=indptr, order=order)
            groups = MERGED(pattern, per_row, per_group, order)
            arrays = [f"{x.dtype}{list(x.shape)}" for x in (groups.first, groups.last, groups.columns, groups.blocks)]
            lines = [*started.lines, *arrays, f"{groups.row_tiles.shape} {groups.per_group}"]
            started.lines.clear()
            started.name(first=groups.first, last=groups.last)
            items = WHOLE(groups)
            arrays = [f"{x.dtype}{list(x.shape)}" for x in (items.items, items.count, items.splits)]
            lines += [*started.lines, *arrays, str(items.pieces)]
            yield f"{index} {transposed} {per_row} {per_group} {ordered}", " ; ".join(lines)
    with card() as started:
        for blocks, rows in ((0, 3), (3000, 1), (2, 0)):
            indices, indptr = put(np.zeros(blocks, np.int32)), put(np.linspace(0, blocks, rows + 1).astype(np.int32))
            started.lines.clear()
            found = MERGED(Pattern(indices, indptr, rows, 4, False), 1, 2)
            empty = found is not None and WHOLE(replace(found, first=found.first[:0]))
            yield f"{blocks} blocks in {rows} rows", f"{found is None} {empty} {' ; '.join(started.lines)}"


@pytest.mark.parametrize(
    "most, bits, made",
    [(2**31, 63, True), (8, 63, False), (9, 63, True), (2**31, 9, True), (2**31, 8, False)],
)
def test_work_lists_that_do_not_fit_their_integers_are_left_to_array_functions(
    most: int, bits: int, made: bool
) -> None:
    """Eight blocks of four columns, in two groups of two: a key has 3 bits of a block, 1 of a member, 3 and 2 more."""
    indices, indptr = put(np.arange(8, dtype=np.int32) % 4), put(np.arange(0, 9, 2, dtype=np.int32))
    with card(), patch.multiple(work_list_launch, _MOST=most, _KEY_BITS=bits):
        assert (MERGED(Pattern(indices, indptr, 4, 4, False), 1, 2) is not None) == made


# ------------------------------------------------------------------------------------------------ grids by themselves
def grids() -> Iterator[tuple[str, str]]:
    """Sizes around the number of threads, and beyond the largest grid."""
    sizes = (1, 127, 128, 129, 2048, 2049, 2**40)
    for size in sizes:
        found: list[Any] = [
            configs.RowMatching("row_bits").grid(size),
            configs.SpgemmPattern("count_pairs", "i32").grid(size, 4),
            configs.WorkListKernel().grid(size),
            configs.WorkListKernel().tiles(size),
            array_kernels.Expand("i32").grid(size),
            array_kernels.segment(F32, "add", 1, 3).grid(size),
            array_kernels.segment(F32, "maximum", 100, 1).grid(size),
            array_kernels.segment(F64, "add", 40, 300).grid(size),
        ]
        yield f"grids {size}", " ".join(map(str, found))


SECTIONS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "products": products,
    "blocks of products": blocks,
    "attention": attention,
    "decode": decode,
    "row matching": matching,
    "pairs of blocks": pairs,
    "work lists": lists,
    "grids": grids,
}


@pytest.mark.parametrize("section", SECTIONS)
def test_launches_are_those_that_were_written_down(section: str) -> None:
    written_lists.compare(PATH, section, SECTIONS[section])


# ------------------------------------------------------------------------------------------------ separate arguments
_TYPES = {"int": np.int32, "i64": np.int64, "long long": np.int64, "unsigned": np.uint32, "float": np.float32}


def parameters(source: str, entry: str) -> list[str]:
    """The types of a kernel's parameters, as its source has them."""
    text = re.sub("//.*", "", (cuda_root() / source).read_text(encoding="utf-8"))
    found = re.search(rf"\b{entry}\(([^{{]*?)\)\s*\{{", text, flags=re.S)
    assert found is not None, entry
    return [" ".join(part.split()[:-1]) for part in found[1].split(",")]


def test_separate_arguments_have_the_types_of_the_parameters() -> None:
    """A number of 64 bits in the place of one of 32 shifts nothing on a card, but its upper half is read by nobody."""
    launched: set[str] = set()

    def run(config: Any, grid: Any, args: tuple[Any, ...], threads: Any = None, uses: Any = ()) -> None:
        spec = config.spec()
        launched.add(spec.entry)
        names = parameters(spec.source, spec.entry)
        assert len(names) == len(args), spec.entry
        for name, x in zip(names, args, strict=True):
            if isinstance(x, np.generic) and "*" not in name:
                assert type(x) is _TYPES[name], (spec.entry, name, x)
            else:
                assert "*" in name or "grid_constant" in name or name[:1].isupper(), (spec.entry, name)
            if isinstance(x, Array) and x.ndim:
                element = name.replace("const", "").replace("__restrict__", "").replace("*", "").strip()
                wanted = {"u32": "uint32", "u16": "uint16", "int": "int32", "i64": "int64"}.get(element)
                assert wanted is None or str(x.dtype) == wanted, (spec.entry, name, x.dtype)

    matched = row_matching.matched
    with (
        card("sm_75"),
        patch.object(row_matching, "run", run),
        patch.object(products_cuda, "run", run),
        patch.object(spgemm_pattern, "run", run, create=True),
        patch("bsrgemm._backend.cupy_backend.run", run),
    ):
        indices, indptr = put(np.arange(40, dtype=np.int32) % 7), put(np.arange(0, 41, 4, dtype=np.int32))
        backend = CupyBackend()
        assert not len(backend.expand(indptr[:1], 0)) and not launched  # nothing is started for nothing
        assert len(backend.expand(indptr, 40)) == 40 and launched == {"expand"}
        backend.segment_reduce("add", put(np.ones((40, 3), F32)), indices, indptr[:-1])
        backend.segment_reduce("add", put(np.ones((40, 3), F32)), None, indptr[:-1])
        order = put(np.arange(5))
        a = put(np.ones((5, 3, 3), F32))
        products_cuda.CudaProducts(HOST).pair_products(a, order, a, order, order, F32)
        matched(Pattern(indices, indptr, 10, 7, False), 1, 4)
    assert {"expand", "spgemm_simt", "row_bits", "overlaps", "match_rows"} <= launched and len(launched) >= 6


def test_a_number_of_threads_is_that_of_the_config_unless_one_is_asked_for() -> None:
    with card() as started:
        for threads in (None, 64):
            launching.run(configs.RowMatching("overlaps"), (1,), (), threads)
    assert [line.split(")")[1].strip(" (,") for line in started.lines] == ["256", "64"]


def test_a_launch_that_cannot_be_numbered_is_left_to_others() -> None:
    """Tiles are numbered with 31 bits."""
    with card() as started, patch.object(block_products, "_MOST", 2**20 + 10):
        a, order = put(np.ones((5, 64, 64), F16)), put(np.arange(5))
        assert block_products.pair_products(a, order, a, order, order, F16) is None
        few = put(np.arange(2))
        assert block_products.pair_products(a[:2], few, a[:2], few, few, F16) is not None
        assert len([x for x in started.lines if "block_products" in x]) == 1
    with card("sm_80"), patch.object(block_products, "_MOST", 5 * 65):
        wide = put(np.ones((5, 64, 128 * 65), F16))
        assert block_products.pair_products(a, order, wide, order, order, F16) is None
        assert block_products.pair_products(a, order, a, order, order, F16) is not None


def test_operands_that_do_not_begin_at_16_bytes_are_left_to_others() -> None:
    a, order = put(np.ones((5, 64, 64), F16)), put(np.arange(4))
    flat = a.reshape(-1)
    odd = flat[4 : 4 + 4 * 64 * 64].reshape(4, 64, 64)
    with card():
        assert block_products.pair_products(a, order, a, order, order, F16) is not None
        assert block_products.pair_products(odd, order, a, order, order, F16) is None
        assert block_products.pair_products(a, order, odd, order, order, F16) is None
        assert block_products.pair_products(a, order[:0], a, order[:0], order[:0], F16) is None


def test_decode_packs_its_argument_once_for_calls_of_one_kind() -> None:
    with card() as started:
        call = decoding(cache_of())
        decode_launch.decode(call)
        with patch.object(decode_launch, "_packed", None), patch.object(decode_launch, "_plan", None):
            decode_launch.decode(replace(call))
        lines = [x for x in started.lines if x.startswith("decode")]
    assert len(lines) == 2 and lines[0] == lines[1]


@pytest.mark.parametrize("module", [attention_launch, decode_launch], ids=["attention", "decode"])
def test_plans_are_remembered_up_to_a_number(module: Any) -> None:
    with card(), patch.object(module, "_MOST_PLANS", 2):
        for n in (64, 128, 192, 256):
            if module is attention_launch:
                attention_launch.forward(HOST, attending((1, 1, n, 64)))
            else:
                decode_launch.decode(decoding(cache_of(n), left=n))
                assert len(decode_launch._templates) <= 2
            assert 0 < len(module._plans) <= 2


def test_tensor_maps_are_remembered_up_to_a_number() -> None:
    with card(), patch.object(attention_launch, "_MOST_MAPS", 2):
        for _ in range(5):
            attention_launch.forward(HOST, attending())
            (plan,) = attention_launch._plans.values()
            assert 0 < len(plan.maps) <= 2
        call = attending()
        attention_launch.forward(HOST, call)
        with patch.object(attention_launch, "tensor_map_of", None):
            attention_launch.forward(HOST, call)


if __name__ == "__main__":
    written_lists.write(PATH, SECTIONS)
