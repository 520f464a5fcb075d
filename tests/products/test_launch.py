"""What a launch remembers of its operands, on kernels that only write down what they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import PropertyMock, patch

import numpy as np
import pytest

pytest.importorskip("cupy")

from cupy.cuda.function import CPointer

import bsrgemm as bg
from bsrgemm._array.leaves import leaf
from bsrgemm._backend import cupy_backend
from bsrgemm._backend.base import Blocks
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._kernels import forced_kernel, jit, workspace
from bsrgemm._products import (
    arguments,
    complex_gemm,
    configs,
    copies,
    heuristics,
    launch,
    matrix_cache,
    measured,
    work_list_launch,
)
from bsrgemm._products import cuda as products_cuda
from bsrgemm._products.call import ProductCall
from bsrgemm._products.engine import ENGINES, ProductEngine
from bsrgemm.dtypes import BFLOAT16, accumulator_dtype

from ..emulator import emulator
from ..emulator.emulator import Array, put

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


class Kernel:
    """Starts nothing, and keeps its name, its launch and its argument."""

    def __init__(self, name: str, started: list[Any]) -> None:
        self.name, self.started = name, started

    def __call__(self, grid: Any, threads: Any, args: tuple[Any, ...], shared_mem: int = 0) -> None:
        assert all(isinstance(x, CPointer) for x in args)  # or CuPy asks for their address at each launch
        self.started.append((self.name, grid, threads, shared_mem, *(x.tobytes() for x in args)))


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Any]]:
    found: list[Any] = []
    with (
        emulator.emulated(tmp_path, arch="sm_90a"),
        patch.object(jit, "load", lambda spec, arch: Kernel(str(spec), found)),
        patch.multiple(work_list_launch, merged=lambda *args: None, whole=lambda *args: None),  # made without kernels
    ):
        yield found


class Matrix:
    """Two block rows of two blocks."""

    def __init__(self, block: int = 64, dtype: Any = F16) -> None:
        self.data = put(np.ones((4, block, block), dtype))
        self.indices, self.indptr = (put(np.array(x, np.int32)) for x in ([0, 1, 0, 1], [0, 2, 4]))
        self._shape = (2 * block, 2 * block)
        self._backend = HOST


def dense(N: int = 64, dtype: Any = F16, rows: int = 128) -> Array:
    return put(np.ones((rows, N), dtype))


#: Operands that begin at the same place lie here.
ROOM_B, ROOM_C = dense(512), dense(512)


def lying(room: Array, N: int = 64, width: int = 128, dtype: Any = F16, skip: int = 0) -> Array:
    """128 rows of `N` elements, `width` elements apart, from element `skip` on."""
    return room.reshape(-1)[skip:].view(dtype)[: 128 * width].reshape(128, width)[:, :N]


def by_columns(room: Array) -> Array:
    return room.reshape(-1)[: 64 * 128].reshape(64, 128).T


def multiply(A: Matrix, B: Array, out: Array, alpha: Any = 1, beta: Any = 0, **options: Any) -> None:
    options = {"may_copy": False, **options}
    launch.product(ProductCall(A, B, out, accumulator_dtype(B.dtype), alpha, beta, **options))


def test_the_same_places_again_are_neither_planned_nor_packed(started, monkeypatch) -> None:
    A = Matrix()
    B, out = dense(), dense()
    multiply(A, B, out)
    monkeypatch.setattr(launch, "_template", None)
    multiply(A, B, out)
    multiply(A, B[:], out[:])  # other arrays, the same memory
    assert started[0] == started[1] == started[2]


def test_arguments_are_packed_again_only_for_other_factors_or_floats(started, monkeypatch) -> None:
    """Equal integers have equal bytes; 0.0 and -0.0 are equal floats that have not."""
    A, B, out = Matrix(), dense(), dense()
    packed: list[Any] = []
    arguments_of = launch.Launch._arguments
    monkeypatch.setattr(
        launch.Launch, "_arguments", lambda self, *args: (packed.append(args[1:3]), arguments_of(self, *args))[1]
    )
    for alpha, beta in ((1, 0), (1, 0), (2, 0), (2, 0), (1, 0), (1.0, 0), (1.0, 0), (1, 0.0), (1, 0), (1, -0.0)):
        multiply(A, B, out, alpha, beta)
    assert packed == [(1, 0), (2, 0), (1, 0), (1.0, 0), (1.0, 0), (1, 0.0), (1, -0.0)]
    assert len(started) == 10 and started[0] == started[1] == started[4] != started[2]


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
    A = Matrix()
    usual: dict[str, Any] = {"B": lying(ROOM_B), "out": lying(ROOM_C)}
    calls = [usual, {**usual, **CHANGES[change]}, usual]
    for call in calls:
        multiply(A, **call)
    for call in calls:
        A._matrix_cache.launches.clear()
        multiply(A, **call)
    assert started[:3] == started[3:]
    assert started[0] == started[2] != started[1]


@pytest.mark.parametrize("dtype", ["?", "i4", "u8", "f4", "f8", "c8", "c16"])
def test_alpha_and_beta_of_every_dtype_are_those_of_the_call(dtype: str, started) -> None:
    A = Matrix(3, dtype)
    B, out = (dense(4, dtype, rows=6) for _ in range(2))
    factors = [(1, 1), (0, 1)] if dtype == "?" else [(1, 1), (-2, 3), (-2, 5), (7, -1)]
    if np.dtype(dtype).kind == "c":
        factors.append((1 - 2j, 3j))
    for alpha, beta in factors:
        multiply(A, B, out, alpha, beta)
    assert len(A._matrix_cache.launches) == 1
    number = np.dtype(dtype.replace("i", "u"))
    for (alpha, beta), (*_, argument) in zip(factors, started, strict=True):
        want = np.array([alpha, beta]).astype(dtype).view(number)
        np.testing.assert_array_equal(np.frombuffer(argument, number, 2), want)


def test_an_argument_belongs_to_one_launch(started, monkeypatch) -> None:
    """Another thread may fill in its own before the first kernel has started."""
    kept: list[Any] = []
    monkeypatch.setattr(jit, "load", lambda spec, arch: lambda *launch, shared_mem: kept.append(launch[2][0]))
    A = Matrix(3, F32)
    B, out = dense(4, F32, 6), dense(4, F32, 6)
    for alpha in (1, 2):
        multiply(A, B, out, alpha)
    assert [np.frombuffer(x.tobytes(), F32, 1)[0] for x in kept] == [1, 2]


def test_tf32_is_asked_for_by_the_call(started) -> None:
    A = Matrix(64, F32)
    B, out = dense(dtype=F32), dense(dtype=F32)
    for tf32 in (False, True, False, True):
        multiply(A, B, out, tf32=tf32)
    assert started[0] == started[2] and started[1] == started[3] and started[0][0] != started[1][0]


def plain(problem: heuristics.Problem) -> configs.Gemm:
    return next(c for c in heuristics.candidates(problem) if isinstance(c, configs.GemmSimt))


def test_another_choice_of_kernel_counts_at_once(started, monkeypatch) -> None:
    A = Matrix()
    B, out = dense(), dense()

    multiply(A, B, out)
    monkeypatch.setattr(measured, "choice", lambda problem: plain(problem) if forced_kernel.name else None)
    with forced_kernel.force_kernel("GemmSimt"):
        multiply(A, B, out)
    multiply(A, B, out)
    monkeypatch.setattr(measured, "choice", plain)
    multiply(A, B, out)
    A._matrix_cache.plans.clear()  # as `tune` does
    multiply(A, B, out)
    multiply(A, B, out, config=heuristics.gemm(launch.problem_of(A._matrix_cache, ProductCall(A, B, out, F32))))
    names = [name.split(":")[1].split()[0] for name, *_ in started]
    assert names == ["gemm_sm90", "gemm_simt", "gemm_sm90", "gemm_sm90", "gemm_simt", "gemm_sm90"]


def test_no_more_than_so_many_places_are_remembered(started, monkeypatch) -> None:
    monkeypatch.setattr(matrix_cache, "_MOST_LAUNCHES", 2)
    A = Matrix()
    places = [dense() for _ in range(5)]
    for out in places:
        multiply(A, dense(), out)
        assert len(A._matrix_cache.launches) <= 2
    assert len(A._matrix_cache.plans) == 1 and len(started) == 5


def test_each_launch_has_scratch_memory_of_its_own(started, monkeypatch) -> None:
    """Within a capture it is another than outside."""
    given = [put(np.zeros(8, np.int32)) for _ in range(2)]
    places = iter(x.data.ptr for x in given)
    monkeypatch.setattr(workspace, "scratch", lambda size, count: (None, 0, next(places)))
    A = Matrix()
    B, out = dense(), dense()
    for _ in given:
        multiply(A, B, out)
    at = arguments.gemm_sm90().patch("schedule.counters").at
    for x, (*_, argument) in zip(given, started, strict=True):
        assert list(np.frombuffer(argument, np.uint64, 3, at)) == [x.data.ptr, 0, x.data.ptr + 8]


def test_rows_are_copied_for_each_product_that_wants_it_and_for_no_other(started, monkeypatch) -> None:
    A = Matrix()
    B, out = dense(63), dense(63)
    monkeypatch.setattr(copies, "wants_aligned_rows", lambda problem: True)
    made: list[Array] = []
    empty = launch.cupy.empty
    monkeypatch.setattr(launch.cupy, "empty", lambda *args: made.append(empty(*args)) or made[-1])
    multiply(A, B, out)
    for value in (1, 2):
        B[...] = value
        multiply(A, B, out, may_copy=True)
        assert len(made) == value and (made[-1][:, :63] == value).all() and made[-1].strides == (128, 2)
    multiply(A, B, out)
    multiply(A, dense(64), dense(64), may_copy=True)
    assert len(made) == 2
    assert [name.split(":")[1].split()[0] for name, *_ in started] == [
        *("gemm_simt", "gemm_sm90", "gemm_sm90", "gemm_simt", "gemm_sm90"),
    ]


def test_zeros_of_both_signs_are_told_apart(started) -> None:
    A = Matrix(3, F32)
    B, out = dense(4, F32, 6), dense(4, F32, 6)
    factors = [(0, 1), (-0.0, 1), (0.0, 1), (1, 0), (1, -0.0), (1.0, 0.0)]
    for alpha, beta in factors:
        multiply(A, B, out, alpha, beta)
    packed = [argument[:8] for *_, argument in started]
    assert packed == [np.array(pair, F32).tobytes() for pair in factors]


def test_what_is_filled_in_again_is_not_packed_again(started, monkeypatch) -> None:
    A = Matrix()
    B, out = dense(), dense()
    packed: list[int] = []
    argument = jit.argument
    monkeypatch.setattr(jit, "argument", lambda data: packed.append(len(data)) or argument(data))
    for alpha, fresh in ((1, 1), (1, 0), (2, 1), (2, 0), (2.0, 1), (1, 1), (1, 0)):
        multiply(A, B, out, alpha)
        assert len(packed) == fresh
        packed.clear()
    assert started[0] == started[1] == started[5] == started[6] and started[2] == started[3] == started[4]


def test_room_for_pieces_is_that_of_the_launch(started, monkeypatch) -> None:
    given = [put(np.zeros(8, F32)) for _ in range(3)]
    rooms = iter((given[0], given[0], given[1], given[2]))
    monkeypatch.setattr(workspace, "scratch", lambda size, count: (None, next(rooms).data.ptr, 64))
    A = Matrix(3, F32)
    B, out = dense(1, F32, 6), dense(1, F32, 6)
    nowhere = SimpleNamespace(data=SimpleNamespace(ptr=0))
    long_rows = SimpleNamespace(pieces=nowhere, parents=nowhere, count=nowhere, bound=1)
    monkeypatch.setattr(matrix_cache.MatrixCache, "long_rows", lambda *how: long_rows)
    for _ in range(4):
        multiply(A, B, out)
    places = [tuple(np.frombuffer(rows, np.uint64)[-2:]) for *_, rows in started]
    assert places == [(x.data.ptr, 64) for x in (given[0], given[0], given[1], given[2])]


def test_a_product_without_long_rows_asks_for_no_scratch_memory(started, monkeypatch) -> None:
    monkeypatch.setattr(workspace, "scratch", None)
    A = Matrix(3, F32)
    multiply(A, dense(1, F32, 6), dense(1, F32, 6))
    ((name, *_, rows),) = started
    assert "spmv_small" in name and not any(np.frombuffer(rows, np.uint64)[-2:])


# ---------------------------------------------------------------------------------------- calls of matmul
class Card(cupy_backend.CupyBackend):
    """The GPU's backend, for arrays of the emulator."""

    name = "card"
    xp = np  # type: ignore[assignment]

    def empty(self, shape: Any, dtype: Any) -> Any:
        return self.xp.empty(shape, dtype)

    def is_dense(self, x: Any) -> bool:
        return isinstance(x, Array)

    def expand(self, indptr: Any, n: int) -> Any:
        return HOST.expand(indptr, n)


class CardProducts(products_cuda.CudaProducts):
    """The GPU's products, for arrays of the emulator, which know nothing of allocations."""

    overlapping = ProductEngine.overlapping


CARD = Card()
ENGINES.register(CARD.name, CardProducts(CARD))
LEAF = leaf(CARD, True)


def matrix(block: int = 64, dtype: Any = F16, canonical: bool | None = True) -> Any:
    A = Matrix(block, dtype)
    return object.__new__(LEAF)._set(Blocks(A.data, A.indices, A.indptr), A._shape, canonical=canonical)


def answer(started: list[Any], A: Any, call: Callable[[Any], Any]) -> Any:
    """What a call starts, or how it fails."""
    started.clear()
    try:
        call(A)
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    return list(started)


B, OUT = lying(ROOM_B), lying(ROOM_C)


def usual(A: Any) -> None:
    bg.matmul(A, B, out=OUT)


def asking(*operands: Any, **options: Any) -> Callable[[Any], Any]:
    """A call on a matrix, for which its class stands."""
    return lambda A: bg.matmul(*(A if x is LEAF else x for x in operands), **{"out": OUT, **options})


def only_simt(A: Any) -> None:
    with forced_kernel.force_kernel("GemmSimt"), patch.object(measured, "choice", plain):
        usual(A)


#: Calls beside the usual one, which begin at the same places.
CALLS: dict[str, Callable[[Any], Any]] = {
    "alpha": asking(LEAF, B, alpha=2),
    "alpha of NumPy": asking(LEAF, B, alpha=np.float32(2)),
    "complex alpha": asking(LEAF, B, alpha=1j),
    "no alpha": asking(LEAF, B, alpha=None),
    "beta": asking(LEAF, B, beta=1),
    "beta of NumPy": asking(LEAF, B, beta=np.int8(1)),
    "complex beta": asking(LEAF, B, beta=1j),
    "an array for beta": asking(LEAF, B, beta=np.zeros(3)),
    "precision": asking(LEAF, B, precision="tf32"),
    "no precision": asking(LEAF, B, precision="tf16"),
    "scale": asking(LEAF, B, scale_a=2),
    "dtype": asking(LEAF, B, out_dtype=np.float32),
    "other side": asking(B.T, LEAF, out=OUT.T),
    "wrong side": asking(B, LEAF),
    "place of B": asking(LEAF, lying(ROOM_B, skip=64)),
    "place of out": asking(LEAF, B, out=lying(ROOM_C, skip=64)),
    "shape of B": asking(LEAF, lying(ROOM_B, 63)),
    "rows of B": asking(LEAF, B[:64]),
    "rows of out": asking(LEAF, B, out=OUT[:64]),
    "columns": asking(LEAF, lying(ROOM_B, 63), out=lying(ROOM_C, 63)),
    "strides of B": asking(LEAF, lying(ROOM_B, width=192)),
    "strides of out": asking(LEAF, B, out=lying(ROOM_C, width=192)),
    "elements of out that share memory": asking(LEAF, B, out=np.broadcast_to(OUT[:1], (128, 64), subok=True)),
    "dtype of B": asking(LEAF, lying(ROOM_B, dtype=BFLOAT16)),
    "dtype of out": asking(LEAF, B, out=lying(ROOM_C, dtype=BFLOAT16)),
    "integers for out": asking(LEAF, B, out=lying(ROOM_C, dtype=np.int16)),
    "B on the host": asking(LEAF, B.view(np.ndarray)),
    "out on the host": asking(LEAF, B, out=OUT.view(np.ndarray)),
    "out in B": asking(LEAF, B, out=B),
    "kernel": only_simt,
    "transpose": lambda A: usual(A.T),
}


@pytest.mark.parametrize("change", CALLS)
def test_a_call_is_remembered_for_its_operands_and_options_only(change: str, started) -> None:
    """A call starts the same, or fails in the same way, whether other calls are remembered or none."""
    A = matrix()
    for _ in range(3):
        usual(A)
    other = CALLS[change]
    calls = (usual, other, other, other, usual)
    found = [answer(started, A, call) for call in calls]
    with patch.object(matrix_cache.MatrixCache, "call_key", lambda *args: None):
        for call, before in zip(calls, found, strict=True):
            A._matrix_cache.launches.clear()
            assert answer(started, A, call) == before


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Whatever goes the long way fails from now on."""
    return lambda: monkeypatch.setattr(CardProducts, "multiply_dense", None)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("N", [None, 64])
def test_a_call_made_before_is_started_at_once(left, lazy, N, started, unchecked) -> None:
    A = matrix()
    B, out = (dense(N or 1) for _ in range(2))
    if N is None:
        B, out = B[:, 0], out[:, 0]
    operands = A.T if lazy else A, B
    if left:
        operands, out = (B.T, operands[0]), out.T

    def call(**factors: Any) -> None:
        assert bg.matmul(*operands, out=out, **factors) is out

    call(), call(), unchecked(), call(), call(alpha=3), call(alpha=np.float64(3))
    assert started[0] == started[1] == started[2] != started[3] == started[4] and len(started) == 5


def test_a_call_of_fp8_made_before_is_scaled_anew(started, unchecked) -> None:
    A = matrix(64, np.uint8)
    B, out = put(np.ones((64, 128), np.uint8)).T, dense(dtype=F32)
    for scale in (2, 3):
        bg.matmul(A, B, out=out, scale_a=scale)
    unchecked()
    for scale in (2, 3):
        bg.matmul(A, B, out=out, scale_b=scale)
    assert started[0] == started[2] != started[1] == started[3]


def test_a_call_of_a_plan_that_is_gone_is_planned_anew(started, monkeypatch) -> None:
    A = matrix()
    for _ in range(3):
        usual(A)
    A._matrix_cache.plans.clear()  # as `tune` does
    monkeypatch.setattr(measured, "choice", plain)
    usual(A)
    names = [name.split(":")[1].split()[0] for name, *_ in started]
    assert names == [*["gemm_sm90"] * 3, "gemm_simt"]


def test_each_product_of_integers_in_a_wider_dtype_asks_for_duplicates(started) -> None:
    """They may have been written since: int8 wraps, and their sum in int32 is another."""
    A = matrix(16, np.int8)
    B, out = dense(64, np.int8, 32), dense(64, np.int32, 32)
    with patch.object(LEAF, "_has_duplicates", PropertyMock(return_value=False)) as asked:
        for count in range(1, 5):
            bg.matmul(A, B, out=out)
            assert asked.call_count == count


def test_a_matrix_that_has_another_array_or_shape_is_another(started) -> None:
    A, B, out = matrix(3, F32), dense(4, F32, 6), dense(4, F32, 6)
    for name in ("data", "indices", "indptr"):
        for _ in range(3):
            bg.matmul(A, B, out=out)
        setattr(A, name, put(getattr(A, name)))
        bg.matmul(A, B, out=out)
        assert np.frombuffer(started[-1][-1], np.uint64, 1, 8)[0] == A.data.data.ptr  # after alpha and beta
        assert all(x is y for x, y in zip(A._matrix_cache.source, A._blocks, strict=True))
    A._shape = (6, 9)
    with pytest.raises(ValueError, match="dimension mismatch"):
        bg.matmul(A, B, out=out)


@pytest.mark.parametrize("why", ["rows", "columns of fp8", "complex", "transpose"])
def test_copies_are_made_for_each_call(why: str, started, monkeypatch) -> None:
    made: list[Any] = []
    options: dict[str, Any] = {}
    if why == "complex":
        A, B, out = matrix(16, "F"), dense(64, "F", 32), dense(64, "F", 32)
        monkeypatch.setattr(complex_gemm, "product", lambda *args, **how: made.append(args))
    elif why == "rows":
        A, B, out = matrix(), dense(63), dense(63)
        monkeypatch.setattr(copies, "wants_aligned_rows", lambda problem: True)
        empty = launch.cupy.empty
        monkeypatch.setattr(launch.cupy, "empty", lambda *args: made.append(args) or empty(*args))
    elif why == "transpose":
        A, B, out, copy = matrix().T, dense(), dense(), matrix()
        monkeypatch.setattr(products_cuda, "_MOST_INT32", 1)
        monkeypatch.setattr(products_cuda, "transposed_copy", lambda x: made.append(x) or copy)
    else:
        A, B, out = matrix(64, np.uint8), dense(64, np.uint8), dense(dtype=F32)
        options = {"scale_a": 2}
        monkeypatch.setattr(products_cuda, "_by_columns", lambda x: made.append(x) or put(x.T).T)
    for count in range(1, 5):
        bg.matmul(A, B, out=out, **options)
        assert len(made) == count
