"""What the engine of a card does around its kernels, on arrays of the emulator and without a launch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._products import (
    autotune,
    block_products,
    complex_gemm,
    heuristics,
    launch,
    matrix_cache,
    measured,
    spgemm_pattern,
    work_list_launch,
)
from bsrgemm._products import cuda as products_cuda
from bsrgemm._products import host as products_host
from bsrgemm._products.call import ProductCall
from bsrgemm._products.engine import ProductEngine
from bsrgemm._products.transposed import transposed_copy
from bsrgemm.dtypes import accumulator_dtype, result_dtype

from ..emulator import emulator
from ..emulator.emulator import put


@pytest.fixture(params=["sm_80"])
def card(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    with emulator.emulated(tmp_path, arch=request.param):
        yield


class Matrix:
    """Two block rows of three block columns, one of which is empty."""

    def __init__(self, R: int, K: int, dtype: Any) -> None:
        rng = np.random.default_rng(R)
        self.data = put(np.empty((4, R, K), dtype))
        self.data[...] = rng.integers(-3, 4, self.data.shape)
        if self.data.dtype.kind == "c":
            self.data[...] += 1j * rng.integers(-3, 4, self.data.shape)
        self.indices, self.indptr = (put(np.array(x, np.int32)) for x in ([0, 2, 0, 2], [0, 2, 4]))
        self._shape = (2 * R, 3 * K)
        self._backend = HOST

    def toarray(self) -> np.ndarray[Any, Any]:
        return bg.bsr_array((self.data.get(), self.indices.get(), self.indptr.get()), self._shape).toarray()


def on_host(call: ProductCall) -> None:
    """The product of a call, by NumPy."""
    A = Matrix.toarray(call.matrix)  # type: ignore[arg-type]
    product = (A.T if call.transposed else A) @ np.asarray(call.B)
    call.out[...] = call.alpha * product + (0 if call.beta == 0 else call.beta * np.asarray(call.out))


# ------------------------------------------------------------------------------------------------ complex products
@pytest.mark.parametrize("dtype", ["F", "D"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("alpha, beta", [(1, 0), (3, 0), (1 - 2j, 0), (2, 1j), (1, 1)], ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_complex_product_is_one_of_real_numbers(
    dtype: str, transposed: bool, alpha: Any, beta: Any, order: str, card: None
) -> None:
    A = Matrix(16, 8, dtype)
    whole = A.toarray()
    whole = whole.T if transposed else whole
    rng = np.random.default_rng(1)
    B = put(rng.integers(-3, 4, (whole.shape[1], 5)) + 1j * rng.integers(-3, 4, (whole.shape[1], 5))).astype(dtype)
    out = put(np.full((whole.shape[0], 5), 2 + 1j, dtype))
    if order == "F":
        out = put(np.full((5, whole.shape[0]), 2 + 1j, dtype)).T
    want = alpha * (whole @ np.asarray(B)) + beta * np.asarray(out)
    calls: list[ProductCall] = []

    def product(call: ProductCall) -> None:
        real = np.dtype("f4" if dtype == "F" else "f8")
        assert call.B.dtype == call.out.dtype == call.acc == call.matrix.data.dtype == real
        assert call.tf32 and call.may_copy and call.beta == 0
        calls.append(call)
        on_host(call)

    stand_in = SimpleNamespace(
        empty=lambda shape, dtype: put(np.full(shape, np.nan, dtype)), negative=np.negative, split=np.split
    )
    with patch.object(launch, "product", product), patch.object(complex_gemm, "cupy", stand_in):
        call = ProductCall(A, B, out, np.dtype(dtype), alpha, beta, transposed=transposed, tf32=True)
        complex_gemm.product(call)
        np.testing.assert_array_equal(np.asarray(out), want)
        # The same matrix again keeps its real twin, but not the values of it.
        A.data[...] *= 2
        out[...] = 0
        complex_gemm.product(call)
    np.testing.assert_array_equal(np.asarray(out), 2 * alpha * (whole @ np.asarray(B)))
    assert calls[0].matrix is calls[1].matrix
    straight = order == "C" and beta == 0 and not isinstance(alpha, complex)
    assert (calls[0].alpha == alpha and calls[0].out.ctypes.data == out.ctypes.data) == straight


#: Beside a product that the tensor cores take: (block, columns, changes), and whether they take it.
SERVED: dict[str, tuple[tuple[int, int], int, dict[str, Any], bool]] = {
    "usual": ((16, 8), 64, {}, True),
    "few columns": ((16, 8), 63, {}, False),
    "odd rows": ((24, 8), 64, {}, False),
    "odd columns": ((16, 12), 64, {}, False),
    "the sides of a transpose": ((8, 16), 64, {"transposed": True}, True),
    "a transpose of odd rows": ((16, 8), 64, {"transposed": True}, False),
    "batches": ((16, 8), 64, {"batches": 2}, False),
    "a real right-hand side": ((16, 8), 64, {"B": "d"}, False),
    "a wider result": ((16, 8), 64, {"out": "D", "acc": "D"}, False),
    "real numbers": ((16, 8), 64, {"dtype": "f"}, False),
}


@pytest.mark.parametrize("case", SERVED)
def test_which_complex_products_are_served(case: str, card: None) -> None:
    block, N, changes, served = SERVED[case]
    dtype = changes.get("dtype", "F")
    A = Matrix(*block, dtype)
    shape = (2, 24, N) if "batches" in changes else (24, N)
    B, out = put(np.ones(shape, changes.get("B", dtype))), put(np.ones(shape, changes.get("out", dtype)))
    acc = np.dtype(changes.get("acc", dtype))
    assert complex_gemm.serves(ProductCall(A, B, out, acc, transposed="transposed" in changes)) == served


def test_complex_products_need_blocks_that_31_bits_count_and_tensor_cores(card: None) -> None:
    A, B = Matrix(16, 8, "F"), put(np.ones((24, 64), "F"))

    def with_blocks(count: int) -> Any:
        data = np.broadcast_to(A.data[:1], (count, 16, 8))
        return SimpleNamespace(data=data)

    for blocks, served in ((2**30 // 128 - 1, True), (2**30 // 128, False), (0, False)):
        assert complex_gemm.serves(ProductCall(with_blocks(blocks), B, B, B.dtype)) == served
    with patch.object(complex_gemm.jit, "device_target", lambda: "sm_75"):
        assert not complex_gemm.serves(ProductCall(A, B, B, B.dtype))


# ------------------------------------------------------------------------------------------------ the engine
ENGINE = products_cuda.CudaProducts(HOST)


def test_a_launch_that_reads_a_copy_is_not_handed_out(card: None) -> None:
    A, B, out = Matrix(16, 8, "f"), put(np.ones((24, 64), "f")), put(np.ones((32, 64), "f"))
    made: list[Any] = []
    with (
        patch.object(launch, "product", lambda call: made.append(call) or "started"),
        patch.object(products_cuda, "transposed_copy", lambda A: Matrix(8, 16, "f")),
        patch.object(products_cuda, "_by_columns", lambda B: put(B)),
    ):
        call = ProductCall(A, B, out, B.dtype)
        assert ENGINE.multiply_dense(call) == "started" and made[-1] is call
        turned = ProductCall(A, B, out, B.dtype, transposed=True)
        assert ENGINE.multiply_dense(turned) == "started" and made[-1].transposed
        for most, copied in ((24, True), (25, False)):  # the longest side has 32 rows, the other one 24
            with patch.object(products_cuda, "_MOST_INT32", most + 8):
                assert (ENGINE.multiply_dense(turned) is None) == copied
                assert made[-1].transposed != copied and (made[-1].matrix is A) != copied
        with patch.object(launch, "wants_columns", lambda B: True):
            scaled = ProductCall(A, B, out, B.dtype, fp8=True)
            assert ENGINE.multiply_dense(scaled) is None and made[-1].B is not B
            assert ENGINE.multiply_dense(call) == "started"
        with patch.multiple(complex_gemm, serves=lambda call: True, product=made.append):
            assert ENGINE.multiply_dense(call) is None and made[-1] is call


def allocation(first: int, size: int) -> Any:
    return SimpleNamespace(data=SimpleNamespace(mem=SimpleNamespace(ptr=first, size=size)))


@pytest.mark.parametrize(
    "x, extents, asked",
    [
        ((1000, 100), [(500, 600)], False),  # far away
        ((200, 100), [(500, 600)], False),  # the right-hand side begins where the result ends
        ((0, 100), [(500, 600)], False),  # and ends where it begins
        ((199, 100), [(500, 600)], True),
        ((1, 100), [(500, 600)], True),
        ((1000, 100), [(500, 600), (200, 300)], False),
        ((1000, 100), [(500, 600), (0, 100)], False),
        ((1000, 100), [(500, 600), (199, 300)], True),
        ((1000, 100), [(500, 600), (0, 101)], True),
    ],
    ids=str,
)
def test_bytes_are_compared_only_where_allocations_meet(
    x: tuple[int, int], extents: list[tuple[int, int]], asked: bool
) -> None:
    """The result lies in an allocation from 100 to 200."""
    questions: list[Any] = []
    with (
        patch.object(products_cuda, "matrix_cache_of", lambda A: SimpleNamespace(extents=extents)),
        patch.object(ProductEngine, "overlapping", lambda *args: questions.append(args) or 7),
    ):
        found = ENGINE.overlapping(allocation(100, 100), allocation(*x), "A")
    assert found == (7 if asked else None) and len(questions) == asked


@pytest.mark.parametrize("batches", [0, 3])
def test_a_copy_by_columns_has_the_same_numbers(batches: int) -> None:
    B = np.arange(max(1, batches) * 12).reshape((batches, 3, 4) if batches else (3, 4))
    with patch.object(products_cuda, "cupy", np):
        found = products_cuda._by_columns(B)
    np.testing.assert_array_equal(found, B)
    assert found.strides[-2] == B.itemsize and found.strides[-1] >= 3 * B.itemsize
    assert all(x.flags.f_contiguous for x in (found if batches else [found]))


@pytest.mark.parametrize("blocks", [0, 3])
@pytest.mark.parametrize("K", [0, 4])
@pytest.mark.parametrize("served", [False, True])
def test_a_sampled_product_that_the_tensor_cores_refuse_goes_to_the_others(
    blocks: int, K: int, served: bool, card: None
) -> None:
    X, Y = put(np.ones((4, K), "f")), put(np.ones((K, 6), "f"))
    indices, indptr = put(np.arange(blocks, dtype=np.int32)), put(np.array([0, blocks, blocks], np.int32))
    asked: list[Any] = []
    answer = "here" if served else None
    with (
        patch.object(block_products, "sampled", lambda *args: asked.append(args) or answer),
        patch.object(ProductEngine, "sampled", lambda *args: "there"),
    ):
        found = ENGINE.sampled(X, Y, indices, indptr, (2, 2), np.dtype("f"), True)
    assert len(asked) == (blocks > 0 and K > 0) and found == ("here" if served and asked else "there")
    if asked:
        assert asked[0][-2:] == (np.dtype("f"), True)


def test_a_pattern_that_the_card_cannot_find_is_sorted(card: None) -> None:
    a: Any = "A"
    b: Any = "B"
    with (
        patch.object(products_cuda.spgemm_pattern, "product_pattern", lambda *args: None),
        patch.object(ProductEngine, "product_pattern", lambda self, *args: ("sorted", *args)),
    ):
        assert ENGINE.product_pattern(a, b, 1) == ("sorted", a, b, 1)
    with patch.object(products_cuda.spgemm_pattern, "product_pattern", lambda *args: args):
        assert ENGINE.product_pattern(a, b, 1) == (a, b, 1)


def test_plans_of_a_matrix_are_remembered_up_to_a_number(card: None) -> None:
    cache = matrix_cache.matrix_cache_of(Matrix(4, 4, "f"))
    with patch.object(matrix_cache, "_MOST_PLANS", 2):
        for key in "abcde":
            assert cache.plan(key, lambda key=key: key).get() == key
            assert cache.plan(key, lambda: "again").get() == key
            assert 0 < len(cache.plans) <= 2


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_a_transposed_copy_is_kept_and_its_values_follow(index: Any) -> None:
    data = np.arange(30.0).reshape(5, 2, 3)
    A = bg.bsr_array((data, np.array([2, 0, 1, 1, 2], index), np.array([0, 2, 4, 5], index)), shape=(6, 9))
    T = transposed_copy(A)
    for factor in (1, 2, -3):
        A.data[...] = factor * data
        assert transposed_copy(A) is T
        np.testing.assert_array_equal(T.toarray(), A.toarray().T)
    changes: list[tuple[str, Any]] = [
        ("data", A.data.copy()),
        ("indices", A.indices.copy()),
        ("indptr", A.indptr.copy()),
    ]
    for name, value in changes:
        setattr(A, name, value)
        other = transposed_copy(A)
        assert other is not T and transposed_copy(A) is other
        np.testing.assert_array_equal(other.toarray(), A.toarray().T)
        T = other
    A._shape = (6, 12)
    assert transposed_copy(A) is not T and transposed_copy(A).shape == (12, 6)


def many(x: Any, count: int) -> Any:
    """An array of so many blocks, all of which are the same memory."""
    return np.broadcast_to(x, (count, *x.shape[1:]), subok=True)


class Started:
    """A launch that starts nothing."""

    def start(self, operands: tuple[Any, ...]) -> str:
        return "started"


def test_blocks_of_a_product_are_numbered_with_31_bits(card: None) -> None:
    """Their rows, and the rows and columns of dense operands, are fewer than 2**31; all others go to other kernels."""
    a, one = put(np.ones((1, 64, 64), np.float16)), put(np.zeros(1, np.int64))
    dtype = np.dtype(np.float16)
    asked: list[Any] = []
    with (
        patch.object(block_products, "contiguous", lambda x: x),
        patch.object(block_products, "_launch_sm80", lambda *args: asked.append(args) or Started()),
    ):
        for count, served in ((2**25 - 1, True), (2**25, False)):
            for pair in ((many(a, count), a), (a, many(a, count))):
                found = block_products.pair_products(pair[0], one, pair[1], one, one, dtype)
                assert (found == "started") == served
        pointer = put(np.array([0, 1], np.int64))
        for side, served in ((2**31 - 64, True), (2**31, False)):
            X = np.broadcast_to(put(np.ones((1, 64), np.float16)), (side, 64), subok=True)
            small = put(np.ones((64, 64), np.float16))
            with patch.object(block_products, "order_of", lambda x: "C"):
                assert (block_products.sampled(X, small, one, pointer, (64, 64), dtype) == "started") == served
                Y = np.broadcast_to(put(np.ones((64, 1), np.float16)), (64, side), subok=True)
                assert (block_products.sampled(small, Y, one, pointer, (64, 64), dtype) == "started") == served


def test_lists_and_pairs_are_numbered_with_31_bits() -> None:
    assert spgemm_pattern._MOST + 2**20 == work_list_launch._MOST == products_cuda._MOST_INT32 == 2**31
    assert work_list_launch._KEY_BITS == 63  # a sort key is a signed integer of 64 bits


# ------------------------------------------------------------------------------------------------ tuning
@pytest.mark.parametrize("precision, N", [(None, 64), ("tf32", np.int64(96)), ("float32", 5)])
def test_tuning_keeps_the_fastest_and_forgets_plans(precision: str | None, N: Any, monkeypatch: Any) -> None:
    A = bg.bsr_array(np.kron(np.eye(3, 4), np.ones((64, 32))).astype(np.float32), blocksize=(64, 32))
    fake = SimpleNamespace(name="cuda", dtypes=HOST.dtypes)
    monkeypatch.setattr(type(A), "_backend", fake)
    rng = SimpleNamespace(standard_normal=lambda shape, dtype: np.ones(shape, dtype))
    stand_in = SimpleNamespace(random=SimpleNamespace(default_rng=lambda seed: rng), empty=np.empty)
    monkeypatch.setitem(__import__("sys").modules, "cupy", stand_in)
    cache = SimpleNamespace(plans={"old": 1})
    problem = heuristics.Problem(
        "sm_80",
        heuristics.types(*[np.dtype("f4")] * 4, np.dtype("i4")),
        *(64, 32, int(N), 1, 3, 4, 3, False, "C", "C", True, True),
        tf32=precision == "tf32",
    )
    asked: list[ProductCall] = []

    def problem_of(given: Any, call: ProductCall) -> heuristics.Problem:
        assert given is cache and call.matrix is A and not call.transposed
        assert call.B.shape == (128, N) and call.out.shape == (192, N) and call.acc == call.out.dtype == np.float32
        assert call.tf32 == (precision == "tf32")
        return problem

    seconds = iter(range(100, 0, -1))

    def timed(call: Any, repeats: int) -> float:
        assert repeats == autotune._REPEATS
        call()
        return float(next(seconds))

    kept: list[Any] = []
    monkeypatch.setattr(launch, "problem_of", problem_of)
    monkeypatch.setattr(launch, "product", asked.append)
    monkeypatch.setattr(matrix_cache, "matrix_cache_of", lambda matrix: cache)
    monkeypatch.setattr(autotune, "time_gpu", timed)
    monkeypatch.setattr(measured, "keep", lambda *args: kept.append(args))
    found = bg.tune(A, N) if precision is None else bg.tune(A, N, precision=precision)
    candidates = list(heuristics.candidates(problem))
    assert [x.config for x in asked] == candidates and not any(x.may_copy for x in asked)
    assert kept == [(problem, candidates[-1])] and not cache.plans
    assert found[0][0] == str(candidates[-1].spec()) and [s for _, s in found] == sorted(s for _, s in found)
    assert len(found) == len(candidates)


@pytest.mark.parametrize("block", [(3, 3), (16, 4), (16, 16), (64, 32)], ids=str)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "F", "D", "i1", "i8"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_tuning_takes_every_dtype_and_block(arch: str, dtype: str, block: tuple[int, int], monkeypatch: Any) -> None:
    A = bg.bsr_array(np.ones(block, dtype), blocksize=block)
    monkeypatch.setattr(type(A), "_backend", SimpleNamespace(name="cuda", dtypes=HOST.dtypes))
    rng = SimpleNamespace(standard_normal=lambda shape, dtype: np.ones(shape, dtype))
    stand_in = SimpleNamespace(random=SimpleNamespace(default_rng=lambda seed: rng), empty=np.empty)
    monkeypatch.setitem(__import__("sys").modules, "cupy", stand_in)
    result = result_dtype(np.dtype(dtype), np.dtype(dtype))
    problem = heuristics.Problem(
        arch,
        heuristics.types(*[np.dtype(dtype)] * 2, result, accumulator_dtype(result), np.dtype("i4")),
        *(*block, 4096, 1, 128, 256, 8192, False, "C", "C", True, True),
    )
    kept: list[Any] = []
    monkeypatch.setattr(launch, "problem_of", lambda cache, call: problem)
    monkeypatch.setattr(launch, "product", lambda call: None)
    monkeypatch.setattr(matrix_cache, "matrix_cache_of", lambda matrix: SimpleNamespace(plans={}))
    monkeypatch.setattr(measured, "keep", lambda *args: kept.append(args))
    monkeypatch.setattr(autotune, "time_gpu", lambda call, repeats: 1.0)
    names = [name for name, _ in bg.tune(A, 4096)]
    assert kept and names and all(names)


@pytest.mark.parametrize("copies_win", [True, False])
def test_tuning_measures_copies_by_columns_too(copies_win: bool, monkeypatch: Any) -> None:
    A = bg.bsr_array(np.ones((64, 32), np.float32), blocksize=(64, 32))
    monkeypatch.setattr(type(A), "_backend", SimpleNamespace(name="cuda", dtypes=HOST.dtypes))
    rng = SimpleNamespace(standard_normal=lambda shape, dtype: np.ones(shape, dtype))
    stand_in = SimpleNamespace(random=SimpleNamespace(default_rng=lambda seed: rng), empty=np.empty)
    monkeypatch.setitem(__import__("sys").modules, "cupy", stand_in)
    problem = heuristics.Problem(
        "sm_90a",
        heuristics.types(*[np.dtype("f4")] * 4, np.dtype("i4")),
        *(64, 32, 4096, 1, 128, 256, 8192, False, "C", "C", True, True),
    )
    asked: list[ProductCall] = []
    kept: list[Any] = []
    monkeypatch.setattr(launch, "problem_of", lambda cache, call: problem)
    monkeypatch.setattr(launch, "product", asked.append)
    cache = SimpleNamespace(plans={"of the kernel that was stored": 1})
    monkeypatch.setattr(matrix_cache, "matrix_cache_of", lambda matrix: cache)
    monkeypatch.setattr(measured, "keep", lambda *args: kept.append(args))

    def timed(call: Any, repeats: int) -> float:
        assert not cache.plans
        call()
        return float((asked[-1].config is None) != copies_win)

    monkeypatch.setattr(autotune, "time_gpu", timed)
    found = bg.tune(A, 4096)
    candidates = list(heuristics.candidates(problem))
    assert [x.config for x in asked] == [None, *candidates] and [x.may_copy for x in asked].count(True) == 1
    assert kept == [(problem, None), (problem, None if copies_win else candidates[0])]
    names = [name for name, _ in found]
    assert ("columns_tf32" in names[0]) == copies_win and sum("-DPARTS=2" in name for name in names) == 1


@pytest.mark.parametrize("N", [0, -1, True, 2.0, "3"])
def test_tuning_wants_a_number_of_columns(N: Any, monkeypatch: Any) -> None:
    A = bg.bsr_array(np.eye(4), blocksize=(2, 2))
    monkeypatch.setattr(type(A), "_backend", SimpleNamespace(name="cuda", dtypes=HOST.dtypes))
    with pytest.raises(ValueError, match="N: wanted a positive integer, got"):
        bg.tune(A, N)
    with pytest.raises(ValueError, match="precision: wanted 'float32' or 'tf32', got 'tf16'"):
        bg.tune(A, 1, precision="tf16")
    with pytest.raises(TypeError, match="does not support dtype"):
        bg.tune(A, 1, dtype="U3")


# ------------------------------------------------------------------------------------------------ on the host
def test_a_choice_that_cannot_be_written_leaves_no_file(tmp_path: Path, monkeypatch: Any) -> None:
    where = tmp_path / "tuned.json"
    monkeypatch.setattr(measured, "path", lambda: where)
    monkeypatch.setattr(measured, "_loaded", {})
    monkeypatch.setattr(measured.disk_cache.os, "replace", lambda *args: (_ for _ in ()).throw(OSError("no room")))
    names = heuristics.types(*[np.dtype("f4")] * 4, np.dtype("i4"))
    one = heuristics.Problem("sm_80", names, 4, 4, 4, 1, 2, 2, 2, False, "C", "C", True, True)
    with pytest.raises(OSError, match="no room"):
        measured.keep(one, heuristics.gemm(one))
    assert not list(tmp_path.iterdir())


def test_booleans_are_added_to_a_result_by_or() -> None:
    A = bg.bsr_array(np.array([[True, False], [False, False]]), blocksize=(1, 1))
    out = np.array([[False, False], [True, False]])
    bg.matmul(A, np.ones((2, 2), bool), out=out, beta=1)
    np.testing.assert_array_equal(out, [[True, True], [True, False]])


def test_a_matrix_of_numpy_times_a_sparse_one_is_a_matrix() -> None:
    A = bg.bsr_matrix(np.arange(6.0).reshape(2, 3), blocksize=(1, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        left = np.asmatrix(np.arange(4.0).reshape(2, 2))
    found = A.__rmatmul__(left)
    assert isinstance(found, np.matrix)
    np.testing.assert_array_equal(found, np.asarray(left) @ A.toarray())
    S = bg.bsr_array(np.arange(4.0).reshape(2, 2), blocksize=(1, 1)).tocsr()
    product = bg.bsr_array(A).__rmatmul__(S)
    np.testing.assert_array_equal(product.toarray(), S.toarray() @ A.toarray())


def test_a_plan_of_matrices_on_two_devices_is_refused(monkeypatch: Any) -> None:
    A = bg.bsr_array(np.eye(4), blocksize=(2, 2))
    B = bg.bsr_matrix(np.eye(4), blocksize=(2, 2))
    monkeypatch.setattr(type(B), "_backend", SimpleNamespace(name="elsewhere"))
    with pytest.raises(TypeError, match="B: wanted a matrix on 'cpu', as A is, got one on 'elsewhere'"):
        bg.plan(A, B)


@pytest.mark.parametrize("precision", [None, "tf32"])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_sampled_product_passes_its_precision_on(precision: str | None, lazy: bool, monkeypatch: Any) -> None:
    """A transpose that is not built is computed as the transpose of another product."""
    pattern = bg.bsr_array(np.ones((4, 6), np.float32), blocksize=(2, 3))
    X, Y = np.ones((4, 5), np.float32), np.ones((5, 6), np.float32)
    asked: list[bool] = []
    sampled = products_host.HostProducts.sampled

    def noting(self: Any, *args: Any) -> Any:
        asked.append(args[-1])
        return sampled(self, *args)

    monkeypatch.setattr(products_host.HostProducts, "sampled", noting)
    if lazy:
        found = bg.sddmm(Y.T, X.T, pattern.T, precision=precision, alpha=2)
    else:
        found = bg.sddmm(X, Y, pattern, precision=precision, alpha=2)
    assert asked == [precision == "tf32"] and (found.toarray() == 10).all()
