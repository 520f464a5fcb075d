"""What a launch remembers of its operands, on kernels that only write down what they are given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm import configs, jit, launch, prepared, scratch, tuned, tuning
from bsrgemm.dtypes import BFLOAT16, accumulator_dtype
from bsrgemm.host import HOST

from . import emulator
from .emulator import Array, put

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


class Kernel:
    """Starts nothing, and keeps its name, its launch and its argument."""

    def __init__(self, name: str, started: list[Any]) -> None:
        self.name, self.started = name, started

    def __call__(self, grid: Any, threads: Any, args: tuple[Any, ...], shared_mem: int = 0) -> None:
        assert all(x.size == 1 for x in args)  # or CuPy takes them for arrays
        self.started.append((self.name, grid, threads, shared_mem, *(x.tobytes() for x in args)))


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    found: list[Any] = []
    with emulator.emulated(tmp_path, arch="sm_90a"):
        monkeypatch.setattr(jit, "load", lambda spec, arch: Kernel(str(spec), found))
        yield found


class Matrix:
    """Two block rows of two blocks."""

    def __init__(self, block: int = 64, dtype: Any = F16) -> None:
        self.data = put(np.ones((4, block, block), dtype))
        self.indices, self.indptr = (put(np.array(x, np.int32)) for x in ([0, 1, 0, 1], [0, 2, 4]))
        self._shape = (2 * block, 2 * block)


def dense(N: int = 64, dtype: Any = F16, rows: int = 128) -> Array:
    return put(np.ones((rows, N), dtype))


#: Operands that begin at the same place lie here.
ROOM_B, ROOM_C = dense(512), dense(512)


def lying(room: Array, N: int = 64, width: int = 128, dtype: Any = F16, skip: int = 0) -> Array:
    """128 rows of so many elements, one every `width`, from an element on."""
    return room.reshape(-1)[skip:].view(dtype)[: 128 * width].reshape(128, width)[:, :N]


def by_columns(room: Array) -> Array:
    return room.reshape(-1)[: 64 * 128].reshape(64, 128).T


def multiply(ready: prepared.Prepared, B: Array, out: Array, alpha: Any = 1, beta: Any = 0, **how: Any) -> None:
    launch.product(ready, ready.whole, B, out, accumulator_dtype(B.dtype), alpha, beta, **how)


def test_the_same_places_again_are_neither_planned_nor_packed(started, monkeypatch) -> None:
    ready = prepared.Prepared(HOST, Matrix())
    B, out = dense(), dense()
    multiply(ready, B, out)
    monkeypatch.setattr(launch, "_launch", None)
    multiply(ready, B, out)
    multiply(ready, B[:], out[:])  # other arrays, the same memory
    assert started[0] == started[1] == started[2]


#: Each beside what is usual.
CHANGES: dict[str, dict[str, Any]] = {
    "alpha": {"alpha": 2.5},
    "beta": {"beta": -1},
    "columns": {"B": lying(ROOM_B, 128), "out": lying(ROOM_C, 128)},
    "batches": {name: room.reshape(4, 128, 128)[..., :64] for name, room in (("B", ROOM_B), ("out", ROOM_C))},
    "place of B": {"B": lying(ROOM_B, skip=64)},
    "place of out": {"out": lying(ROOM_C, skip=64)},
    "order of B": {"B": by_columns(ROOM_B)},
    "order of out": {"out": by_columns(ROOM_C)},
    "rows of B": {"B": lying(ROOM_B, width=192)},
    "rows of out": {"out": lying(ROOM_C, width=192)},
    "alignment of B": {"B": lying(ROOM_B, skip=1)},
    "alignment of out": {"out": lying(ROOM_C, skip=1)},
    "dtype of B": {"B": lying(ROOM_B, dtype=BFLOAT16)},
    "dtype of out": {"out": lying(ROOM_C, dtype=BFLOAT16)},
    "transposed": {"transposed": True},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_launch_is_remembered_for_its_operands_only(change: str, started) -> None:
    """What a kernel is given is the same whether other launches are remembered or none."""
    ready = prepared.Prepared(HOST, Matrix())
    usual: dict[str, Any] = {"B": lying(ROOM_B), "out": lying(ROOM_C)}
    calls = [usual, {**usual, **CHANGES[change]}, usual]
    for call in calls:
        multiply(ready, **call)
    for call in calls:
        ready.launches.clear()
        multiply(ready, **call)
    assert started[:3] == started[3:]
    assert started[0] == started[2] != started[1]


@pytest.mark.parametrize("dtype", ["?", "i4", "u8", "f4", "f8", "c8", "c16"])
def test_alpha_and_beta_of_every_dtype_are_those_of_the_call(dtype: str, started) -> None:
    ready = prepared.Prepared(HOST, Matrix(3, dtype))
    B, out = (dense(4, dtype, rows=6) for _ in range(2))
    factors = [(1, 1), (0, 1)] if dtype == "?" else [(1, 1), (-2, 3), (7, -1)]
    if np.dtype(dtype).kind == "c":
        factors.append((1 - 2j, 3j))
    for alpha, beta in factors:
        multiply(ready, B, out, alpha, beta)
    assert len(ready.launches) == 1
    number = np.dtype(dtype.replace("i", "u"))
    for (alpha, beta), (*_, argument) in zip(factors, started, strict=True):
        want = np.array([alpha, beta]).astype(dtype).view(number)
        np.testing.assert_array_equal(np.frombuffer(argument, number, 2), want)


def test_an_argument_belongs_to_one_launch(started, monkeypatch) -> None:
    """Another thread may fill in its own before the first kernel has started."""
    kept: list[Any] = []
    monkeypatch.setattr(jit, "load", lambda spec, arch: lambda grid, threads, args: kept.append(args[0]))
    ready = prepared.Prepared(HOST, Matrix(3, F32))
    B, out = dense(4, F32, 6), dense(4, F32, 6)
    for alpha in (1, 2):
        multiply(ready, B, out, alpha)
    assert [np.frombuffer(x.tobytes(), F32, 1)[0] for x in kept] == [1, 2]


def test_tf32_is_asked_for_by_the_call(started) -> None:
    ready = prepared.Prepared(HOST, Matrix(64, F32))
    B, out = dense(dtype=F32), dense(dtype=F32)
    for tf32 in (False, True, False, True):
        multiply(ready, B, out, tf32=tf32)
    assert started[0] == started[2] and started[1] == started[3] and started[0][0] != started[1][0]


def test_another_choice_of_kernel_counts_at_once(started, monkeypatch) -> None:
    ready = prepared.Prepared(HOST, Matrix())
    B, out = dense(), dense()

    def plain(problem: tuning.Problem) -> configs.Gemm:
        return next(c for c in tuning.candidates(problem) if isinstance(c, configs.GemmSimt))

    multiply(ready, B, out)
    monkeypatch.setattr(tuned, "choice", lambda problem: plain(problem) if tuned.wanted else None)
    with tuned.only("GemmSimt"):
        multiply(ready, B, out)
    multiply(ready, B, out)
    monkeypatch.setattr(tuned, "choice", plain)
    multiply(ready, B, out)
    ready.plans.clear()  # as `tune` does
    multiply(ready, B, out)
    multiply(ready, B, out, config=tuning.gemm(launch.problem_of(ready, ready.whole, F16, F16, F32, 64)))
    names = [name.split(":")[1].split()[0] for name, *_ in started]
    assert names == ["gemm_sm90", "gemm_simt", "gemm_sm90", "gemm_sm90", "gemm_simt", "gemm_sm90"]


def test_no_more_than_so_many_places_are_remembered(started, monkeypatch) -> None:
    monkeypatch.setattr(launch, "_MOST_LAUNCHES", 2)
    ready = prepared.Prepared(HOST, Matrix())
    places = [dense() for _ in range(5)]
    for out in places:
        multiply(ready, dense(), out)
        assert len(ready.launches) <= 2
    assert len(ready.plans) == 1 and len(started) == 5


def test_each_launch_has_scratch_memory_of_its_own(started, monkeypatch) -> None:
    """Within a capture it is another than outside."""
    given = [put(np.zeros(8, np.int32)) for _ in range(2)]
    counters = iter(given)
    monkeypatch.setattr(scratch, "counters", lambda count: next(counters))
    ready = prepared.Prepared(HOST, Matrix())
    B, out = dense(), dense()
    for _ in given:
        multiply(ready, B, out)
    (made,) = ready.plans.values()
    at = made.value.tensor.scratch_at
    for x, (*_, argument) in zip(given, started, strict=True):
        assert list(np.frombuffer(argument, np.uint64, 3, at)) == [x.data.ptr, 0, x.data.ptr + 8]


def test_rows_are_copied_for_each_product_that_wants_it_and_for_no_other(started, monkeypatch) -> None:
    ready = prepared.Prepared(HOST, Matrix())
    B, out = dense(63), dense(63)
    monkeypatch.setattr(tuning, "wants_aligned_rows", lambda problem: True)
    made: list[Array] = []
    empty = launch.cupy.empty
    monkeypatch.setattr(launch.cupy, "empty", lambda *args: made.append(empty(*args)) or made[-1])
    multiply(ready, B, out)
    for value in (1, 2):
        B[...] = value
        multiply(ready, B, out, copies=True)
        assert len(made) == value and (made[-1][:, :63] == value).all() and made[-1].strides == (128, 2)
    multiply(ready, B, out)
    multiply(ready, dense(64), dense(64), copies=True)
    assert len(made) == 2
    assert [name.split(":")[1].split()[0] for name, *_ in started] == [
        *("gemm_simt", "gemm_sm90", "gemm_sm90", "gemm_simt", "gemm_sm90"),
    ]


def test_a_product_without_long_rows_asks_for_no_scratch_memory(started, monkeypatch) -> None:
    for name in ("room", "counters"):
        monkeypatch.setattr(scratch, name, None)
    ready = prepared.Prepared(HOST, Matrix(3, F32))
    multiply(ready, dense(1, F32, 6), dense(1, F32, 6))
    ((name, *_, rows),) = started
    assert "spmv_small" in name and not any(np.frombuffer(rows, np.uint64)[-2:])
