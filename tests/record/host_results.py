"""What the kernels would have computed, from the host: the results of every engine method on the stand-in.

Each function that starts kernels is run first; then the host's engine is given the same call on the same memory and
writes the result. That is done as far below as possible, so that copies and conversions on the way are real ones and
the tests see an error in them. Where the launch code waits for numbers of a kernel, these come from the host too. This
file alone knows the names of those functions.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import struct
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from bsrgemm._products.list_configs import SampledTiles

import bsrgemm
from bsrgemm._attention import append_host, append_launch, turn_order
from bsrgemm._attention import cuda as cuda_attention
from bsrgemm._attention import host as host_attention
from bsrgemm._attention import launch as attention_launch
from bsrgemm._backend import cupy_backend, structure
from bsrgemm._backend.base import Blocks, ConjugateVectors
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._kernels import workspace
from bsrgemm._products import arguments, block_products, launch, sampled_tiles, spgemm_pattern
from bsrgemm._products import cuda as cuda_products
from bsrgemm._products import host as host_products
from bsrgemm._products.call import ProductPattern

from ..attention.turn_orders import turns_of
from ..products import tile_lists
from . import log, stand_in

#: Results of calls that were made before: tests repeat a call a thousand times to see the same bits.
_results: dict[Any, Any] = {}
_MOST_RESULTS = 64
#: What the host computes for the launches that `matmul`, `sddmm` and `attention` cache.
_replays: dict[int, tuple[Any, Callable[..., None]]] = {}
#: What it computes for a launch that is moved to two other addresses.
_moves: dict[int, Callable[[int, int], Callable[..., None]]] = {}
#: In each thread, the calls of `launch.product` that are under way; they compute what launches they start would.
_multiplying = threading.local()


def begin_test() -> None:
    """Forget what other tests left: memory for captures has places that depend on all captures before."""
    _results.clear()
    _replays.clear()
    _moves.clear()


def fresh_workspace() -> None:
    """Counters and the memory of captures as in a new process: where they lie depends on what ran before."""
    for name in ("_zeroed", "_reserves", "_captures"):
        setattr(workspace, name, {})


def install() -> None:
    """Let the GPU's engines deliver what the host computes."""
    log.install(stand_in.load, stand_in.encode_tensor_map)
    workspace._capture_info = stand_in.capture_info
    backend, products = cupy_backend.CupyBackend, cuda_products.CudaProducts
    for where, name, host in (
        (backend, "expand", _expand),
        (backend, "segment_reduce", HOST.segment_reduce),
        (products, "pair_products", _pair_products),
        (products, "sampled", host_products.ENGINE.sampled),
    ):
        setattr(where, name, _returning(getattr(where, name), host))
    cupy_backend.launch_vector_step = _vector_step(cupy_backend.launch_vector_step)
    launch.product = _product(launch.product)
    launch._columns_tf32 = _columns_tf32(launch._columns_tf32)
    launch.Launch.start = _start(launch.Launch.start)  # type: ignore[method-assign]
    products.sampled_launch = _sampled_launch(products.sampled_launch)  # type: ignore[method-assign]
    blocks = block_products.BlockLaunch
    blocks.start = _start_sampled(blocks.start)  # type: ignore[method-assign]
    prepared = block_products.PairsLaunch
    prepared.of = _of_pairs(prepared.of)  # type: ignore[method-assign]
    for kept, moving in ((launch.Launch, launch.MovingLaunch), (blocks, block_products.MovingBlockLaunch)):
        kept.movable = _movable(kept.movable)  # type: ignore[attr-defined]
        moving.move, moving.kept = _move(moving.move), _kept(moving.kept)  # type: ignore[attr-defined]
    attention_launch.forward = _forward(attention_launch.forward)
    again = attention_launch.Launch
    again.start = _start_attention(again.start)  # type: ignore[method-assign]
    attention = cuda_attention.CudaAttention
    attention.decode = _decode(attention.decode)  # type: ignore[method-assign]
    append = append_launch.CudaAppend
    append.append = _append(append.append)  # type: ignore[method-assign]
    attention.backward = _backward(attention.backward)  # type: ignore[method-assign]
    turn_order.in_turn = _in_turn(turn_order.in_turn)
    sampled_tiles.listed = _listed(sampled_tiles.listed)
    spgemm_pattern.product_pattern = _pattern(spgemm_pattern.product_pattern)
    spgemm_pattern.begin = _pattern(spgemm_pattern.begin)
    stand_in.Kernel.results |= {
        "count_pairs": _count_pairs,
        "list_pairs": _count_columns,
        "list_at_once": _list_at_once,
    }


# ------------------------------------------------------------------------------------------------- helpers
def _host(x: Any) -> Any:
    """Memory of the device as an array of NumPy; whatever else, as it is."""
    if isinstance(x, stand_in.ndarray):
        return x._memory
    if isinstance(x, tuple) and not hasattr(x, "_fields"):
        return tuple(map(_host, x))
    return x


def _value(x: Any) -> Any:
    """Something that tells equal arguments of a call from others."""
    if isinstance(x, np.ndarray):
        data = np.ascontiguousarray(x).view(np.uint8).reshape(-1) if x.size else x.reshape(-1)
        return x.shape, x.dtype.str, zlib.crc32(data), zlib.adler32(data)
    if isinstance(x, tuple | list):
        return tuple(map(_value, x))
    return repr(x)


def _once(key: Any, compute: Callable[[], Any]) -> Any:
    """The result for these arguments, computed when it is first asked for."""
    key = _value(key)
    if key not in _results:
        if len(_results) >= _MOST_RESULTS:
            _results.clear()
        with np.errstate(all="ignore"):
            try:
                _results[key] = compute()
            except (IndexError, OverflowError, ValueError):  # garbage in index arrays, which kernels clamp
                _results[key] = None
    return _results[key]


def _returning(original: Callable[..., Any], host: Callable[..., Any]) -> Callable[..., Any]:
    """A method that returns an array."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)

        def work() -> None:
            given = tuple(map(_host, args))
            found = _once((original.__name__, given, sorted(kwargs.items())), lambda: host(*given, **kwargs))
            result._memory[...] = 0 if found is None else found

        stand_in.do(work)
        return result

    return method


def _vector_step(original: Callable[..., None]) -> Callable[..., None]:
    """A step of a Krylov method, which changes its vectors and numbers in their places."""

    @functools.wraps(original)
    def launch_vector_step(call: Any) -> None:
        original(call)

        def work() -> None:
            _, u, v, x, p, a, b, total, numbers = map(_host, call)
            with np.errstate(all="ignore"):
                if call.operation == "kInnerProduct":
                    total[...] = HOST.inner_product(u, v)
                elif call.operation == "kDirection":
                    HOST.multiply_by_ratio_and_add(u, a, b, v)
                else:
                    HOST.advance(ConjugateVectors(x, u, p, v), a, b, total, numbers, np.empty_like(x))

        stand_in.do(work)

    return launch_vector_step


def _pair_products(a: Any, ia: Any, b: Any, ib: Any, *args: Any) -> Any:
    """As the host has it; pairs with a block that does not exist add nothing, as in the kernels."""
    fine = (ia >= 0) & (ia < len(a)) & (ib >= 0) & (ib < len(b))
    if not fine.all():
        a, b = (np.concatenate([x, np.zeros((1, *x.shape[1:]), x.dtype)]) for x in (a, b))
        ia, ib = np.where(fine, ia, len(a) - 1), np.where(fine, ib, len(b) - 1)
    return host_products.ENGINE.pair_products(a, ia, b, ib, *args)


def _expand(indptr: Any, n: int) -> Any:
    """As the host has it, for pointers that are garbage too."""
    rows = np.searchsorted(indptr[1:-1], np.arange(n), side="right")
    return rows.astype(indptr.dtype)


# ------------------------------------------------------------------------------------------------ products
def _innermost(
    original: Callable[..., Any], result: Callable[..., None], under_way: threading.local
) -> Callable[..., Any]:
    """A function that may call itself with copies of its operands: the host does the innermost call, on the copies."""

    @functools.wraps(original)
    def function(*args: Any) -> Any:
        calls: list[bool] = under_way.__dict__.setdefault("calls", [])  # of each: has it called itself?
        if calls:
            calls[-1] = True
        calls.append(False)
        try:
            returned = original(*args)
        finally:
            again = calls.pop()
        if not again:
            result(returned, *args)
        return returned

    return function


def _product(original: Callable[..., Any]) -> Callable[..., Any]:
    def multiply(started: Any, call: Any) -> None:
        B, out = call.B._memory, call.out._memory
        compute = _multiplication(call, B, out)
        if started is not None:
            _replays[id(started)] = (started, compute)
            _moves[id(started)] = lambda b, c: _multiplication(call, _lying(b, B), _lying(c, out))
        stand_in.do(lambda: compute(call.alpha, call.beta))

    return _innermost(original, multiply, _multiplying)


def _columns_tf32(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def columns(B: Any, parts: int, room: Any) -> Any:
        result = original(B, parts, room)

        def work() -> None:
            if parts == 2:  # products by the stand-in read one part
                result._memory[...] = B._memory
                return
            rounded = np.ascontiguousarray(B._memory * np.float32(1 + 0.72134752 / 2048))  # as exact_tf32 of the kernel
            result._memory[...] = (rounded.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)

        stand_in.do(work)
        return result

    return columns


def _multiplication(call: Any, B: Any, out: Any) -> Callable[[Any, Any], None]:
    """What a call computes with operands and a result in this memory."""
    A = call.matrix

    def compute(alpha: Any, beta: Any) -> None:
        arrays = tuple(map(_host, (A.data, A.indices, A.indptr)))
        how = (alpha, beta, A._shape, call.transposed, call.tf32, call.fp8, call.acc, out.dtype)

        def product() -> Any:
            result, matrix = out.copy(), bsrgemm.bsr_array(arrays, shape=A._shape)
            moved = replace(call, matrix=matrix, B=B, out=result, alpha=alpha, beta=beta, config=None)
            host_products.ENGINE.multiply_dense(moved)
            return result

        found = _once(("product", arrays, B, out if beta != 0 else out.shape, how), product)
        out[...] = 0 if found is None else found

    return compute


def _start(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def start(self: Any, plan: Any, alpha: Any, beta: Any) -> None:
        original(self, plan, alpha, beta)
        known = _replays.get(id(self))
        if known is not None and not getattr(_multiplying, "calls", None):
            stand_in.do(lambda: known[1](alpha, beta))

    return start


def _movable(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def movable(self: Any) -> Any:
        found, computing = original(self), _moves.get(id(self))
        if found is not None and computing is not None:
            _moves[id(found)] = computing
        return found

    return movable


def _move(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def move(self: Any, places: tuple[int, int]) -> None:
        original(self, places)
        computing = _moves.get(id(self))
        if computing is not None:
            _replays[id(self)] = (self, computing(*places))

    return move


def _kept(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def kept(self: Any) -> Any:
        found, known = original(self), _replays.get(id(self))
        if known is not None:
            _replays[id(found)], _moves[id(found)] = (found, known[1]), _moves[id(self)]
        return found

    return kept


def _lying(pointer: int, like: Any) -> Any:
    """An array with the shape, strides and dtype of another one, at an address of the device."""
    reach = [(n - 1) * step for n, step in zip(like.shape, like.strides, strict=True)]
    before = -sum(r for r in reach if r < 0)
    size = before + sum(r for r in reach if r > 0) + like.itemsize
    memory = (ctypes.c_char * size).from_address(pointer - before)
    return np.ndarray(like.shape, like.dtype, memory, before, like.strides)


def _sampled_launch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sampled_launch(self: Any, X: Any, Y: Any, pattern: Any, dtype: Any, tf32: bool = False) -> Any:
        found = original(self, X, Y, pattern, dtype, tf32)
        if found is not None:
            x, y = X._memory, Y._memory

            def computing(x: Any, y: Any) -> Callable[[Any], None]:
                def compute(result: Any) -> None:
                    arrays = (x, y, _host(pattern.indices), _host(pattern.indptr))
                    how = (pattern.blocksize, dtype)
                    values = _once(("sampled", arrays, how), lambda: host_products.ENGINE.sampled(*arrays, *how))
                    result._memory[...] = 0 if values is None else values

                return compute

            _replays[id(found)] = (found, computing(x, y))
            _moves[id(found)] = lambda a, b: computing(_lying(a, x), _lying(b, y))
        return found

    return sampled_launch


def _of_pairs(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def of(self: Any, blocks: int, pairs: int, rows: int) -> Any:
        found, lists = original(self, blocks, pairs, rows), self.longest.lists

        def compute(result: Any) -> None:
            a, b = (x._memory for x in self.longest.copies)
            left, right, starts = lists.left._memory[:pairs], lists.right._memory[:pairs], lists.starts._memory[:blocks]
            given = a, left, b, right, starts, found.dtype, rows
            values = _once(("pair_products", given), lambda: _pair_products(*given))
            result._memory[...] = 0 if values is None else values

        _replays[id(found)] = (found, compute)
        return found

    return of


def _start_sampled(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def start(self: Any) -> Any:
        result = original(self)
        known = _replays.get(id(self))
        if known is not None and known[0] is self:
            stand_in.do(lambda: known[1](result))
        return result

    return start


# ----------------------------------------------------------------------------------------------- attention
def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def attend(started: Any, backend: Any, call: Any) -> None:
        outputs = [call.out._memory, None if call.lse is None else call.lse._memory]
        arrays = {name: _host(getattr(call, name)) for name in ("q", "k", "v", "scales", "bounds")}
        numbers = (call.scale, call.softcap, call.left, call.right, call.bottom_right, call.fp8, call.value_scale)

        def work() -> None:
            mask = None if call.mask is None else call.mask.get()
            masked = () if mask is None else (mask.indptr, mask.indices, mask.kinds, mask.bits, mask.heads, mask.block)

            def compute() -> Any:
                results = [None if x is None else np.empty_like(x) for x in outputs]
                host_attention.ENGINE.forward(replace(call, **arrays, mask=mask, out=results[0], lse=results[1]))
                return results

            dtypes = [None if x is None else x.dtype for x in outputs]
            found = _once(("attention", list(arrays.values()), masked, numbers, dtypes), compute) or (0, 0)
            for x, result in zip(outputs, found, strict=True):
                if x is not None:
                    x[...] = result

        if started is not None:
            _replays[id(started)] = (started, work)
        stand_in.do(work)

    return _innermost(original, attend, threading.local())


def _start_attention(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def start(self: Any) -> bool:
        known = _replays.get(id(self))
        if known is None or known[0] is not self or not original(self):  # a launch of an earlier test is made anew
            return False
        stand_in.do(known[1])
        return True

    return start


def _backward(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def backward(self: Any, call: Any) -> None:
        original(self, call)
        names = ("q", "k", "v", "out", "dout", "lse", "dlse", "delta", "bounds")
        results = {name: getattr(call, name) for name in ("dq", "dk", "dv")}

        def work() -> None:
            arrays = {name: _host(getattr(call, name)) for name in names}
            mask = None if call.mask is None else call.mask.get()
            masked = () if mask is None else (mask.indptr, mask.indices, mask.kinds, mask.bits, mask.heads, mask.block)

            def compute() -> Any:
                found = {name: np.empty(x.shape, x.dtype) for name, x in results.items()}
                host_attention.ENGINE.backward(replace(call, **arrays, **found, mask=mask))
                return list(found.values())

            numbers = (call.scale, call.softcap, call.left, call.right, call.bottom_right)
            dtypes = [x.dtype for x in results.values()]
            computed = _once(("backward", list(arrays.values()), masked, numbers, dtypes), compute) or (0, 0, 0)
            for x, result in zip(results.values(), computed, strict=True):
                x._memory[...] = result

        stand_in.do(work)

    return backward


def _decode(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def decode(self: Any, call: Any) -> None:
        original(self, call)
        q, cache, out, lse = call.q, call.cache, call.out, call.lse

        def work() -> None:
            moved = copy.copy(cache)
            moved._backend = HOST
            for name in ("k", "v", "table", "_device_lengths"):
                setattr(moved, name, _host(getattr(cache, name)))
            moved._captured, moved._lengths = False, moved._device_lengths.astype(np.int64)
            if moved.table is not None:
                moved._pages = moved.table

            def compute() -> Any:
                results = np.empty(out.shape, out.dtype), None if lse is None else np.empty(lse.shape, lse.dtype)
                arrays = {"q": _host(q), "blocks": _host(call.blocks), "out": results[0], "lse": results[1]}
                host_attention.ENGINE.decode(replace(call, cache=moved, **arrays))
                return results

            arrays = (q, call.blocks, cache.k, cache.v, cache.table, cache._device_lengths)
            numbers = (call.block, call.left, call.scale, call.softcap, lse is None)
            found = _once(("decode", tuple(map(_host, arrays)), numbers), compute) or (0, 0)
            for x, result in zip((out, lse), found, strict=True):
                if x is not None:
                    x._memory[...] = result

        stand_in.do(work)

    return decode


def _append(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def append(self: Any, call: Any) -> None:
        original(self, call)
        names = ("k", "v", "to_k", "to_v", "lengths", "refused", "table", "takes")
        moved = replace(call, **{name: _host(getattr(call, name)) for name in names}, new_table=None)
        stand_in.do(lambda: append_host.ENGINE.append(moved))

    return append


# ------------------------------------------------------------------------------------- lists of patterns and masks
def _in_turn(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def in_turn(found: Any, config: Any, tiles: int, rows: int, walkers: int) -> Any:
        got = original(found, config, tiles, rows, walkers)

        def fill() -> None:
            first = _host(found.first)
            columns = _host(found.columns)[: first[-1]]
            known = min(walkers, config.walkers)
            order = _once((first, columns, known), lambda: turns_of(first, columns, tiles, rows, known))
            if order is not None:
                for to, source in ((got.columns, found.columns), (got.parts, found.parts)):
                    if to is not None:
                        _host(to)[: len(order)] = _host(source)[order]

        stand_in.do(fill)
        return got

    return in_turn


def _listed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def listed(indices: Any, indptr: Any, columns: int, config: Any) -> Any:
        got = original(indices, indptr, columns, config)
        kernel = SampledTiles(config.row_parts, config.parts)

        def tiles() -> list[list[tuple[int, ...]]]:
            """The records of each window of block rows."""
            bounds, own = _host(indptr).tolist(), _host(indices).tolist()
            pattern = [{own[p]: p for p in range(*ends)} for ends in pairwise(bounds)]
            windows: list[list[tuple[int, ...]]] = [[] for _ in range(kernel.grid(len(pattern), columns)[0])]
            for rows, cols, blocks in tile_lists.tiles(kernel, pattern):
                record = (*rows, *cols, *(block for line in blocks for block in line))
                windows[max(rows) // kernel.rows].append(record)
            return windows

        def fill() -> None:
            windows = _once((_host(indices), _host(indptr), columns, kernel), tiles)
            if windows is not None:
                lengths = [len(window) for window in windows]
                firsts = np.cumsum([0, *lengths])[:-1]
                _host(got.counts)[...] = [sum(lengths), *np.stack([lengths, firsts], axis=1).reshape(-1)]
                if sum(lengths):
                    _host(got.tiles)[: sum(lengths)] = [record for window in windows for record in window]

        stand_in.do(fill)
        return got

    return listed


# ------------------------------------------------------------------------------- which blocks of a product meet
#: The pattern of the product that is being made, and the dtype of its indices.
_expected: list[tuple[ProductPattern, Any]] = []


def _pattern(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def listed(a: Any, b: Any, block_cols: int) -> Any:
        """What `product_pattern` or `begin` returns; their kernels write what the host finds."""
        if not len(a.indptr) - 1 or max(len(a.indices), len(b.indices), block_cols) >= 2**31:
            return original(a, b, block_cols)
        (left, left_places), (right, right_places) = (
            _in_range(*(x._memory for x in matrix[1:]), n) for matrix, n in ((a, len(b.indptr) - 1), (b, block_cols))
        )
        found = _once(("pattern", left[1:], right[1:], block_cols), lambda: _host_pattern(left, right, block_cols))
        found = found._replace(left=left_places[found.left], right=right_places[found.right])
        _expected.append((found, structure.index_dtype(0, *a[1:], *b[1:])))
        try:
            result = original(a, b, block_cols)
        finally:
            _expected.pop()
        if isinstance(result, ProductPattern):
            for x, value in zip(result, found, strict=True):
                x._memory[...] = value
        return result

    return listed


def _host_pattern(left: Blocks, right: Blocks, block_cols: int) -> Any:
    return host_products.ENGINE.product_pattern(left, right, block_cols)


def _in_range(indices: Any, indptr: Any, columns: int) -> tuple[Blocks, np.ndarray[Any, Any]]:
    """The blocks whose columns exist, as kernels see them, and where they are among all."""
    fine = (indices >= 0) & (indices < columns)
    before = np.concatenate([[0], np.cumsum(fine)]).astype(indptr.dtype)
    return Blocks(None, indices[fine], before[indptr]), np.flatnonzero(fine)


def _at(pointer: int, dtype: Any, count: int) -> np.ndarray[Any, Any]:
    """Numbers at an address of the device."""
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(pointer), dtype)


def _pointer(args: tuple[Any, ...], name: str) -> int:
    """A pointer of the argument of spgemm_pattern.cu."""
    return int(struct.unpack_from("=Q", args[0].tobytes(), arguments.SPGEMM_PATTERN.offsets[name])[0])


def _count_pairs(args: tuple[Any, ...]) -> None:
    found, _ = _expected[-1]
    ends = np.append(found.starts, len(found.left))
    pairs = np.diff(ends[found.indptr]) if len(found.indptr) else np.zeros(0, np.int64)
    before = _at(_pointer(args, "before"), np.int64, len(pairs) + 2)
    before[1:-1], before[-1] = pairs, pairs.max(initial=0)


def _count_columns(args: tuple[Any, ...]) -> None:
    found, index = _expected[-1]
    columns = np.diff(found.indptr)
    _at(_pointer(args, "count"), index, len(columns) + 1)[1:] = columns


def _list_at_once(args: tuple[Any, ...]) -> None:
    found, index = _expected[-1]
    _at(_pointer(args, "totals"), np.int64, 2)[...] = len(found.left), len(found.indices)
    room = struct.unpack_from("=2q", args[0].tobytes(), arguments.SPGEMM_PATTERN.offsets["most_pairs"])
    if len(found.left) <= room[0] and len(found.indices) <= room[1]:
        kinds = {"left": np.int32, "right": np.int32, "starts": np.int32, "indices": index}
        for name, kind in kinds.items():
            value = getattr(found, name)
            _at(_pointer(args, name), kind, len(value))[...] = value
        _at(_pointer(args, "count"), index, len(found.indptr))[...] = found.indptr
