"""An operation in place on a property either works, or is refused before anything has changed."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg


def dense(dtype: Any = np.complex128) -> Any:
    found = np.arange(16.0).reshape(4, 4) + 1
    return found.astype(dtype) * (1 + 2j if np.dtype(dtype).kind == "c" else 1)


def cache() -> Any:
    found = bg.KVCache(2, 1, 8, 4, dtype="float32", device="cpu")
    found.append(np.ones((2, 1, 3, 4), np.float32), np.ones((2, 1, 3, 4), np.float32))
    return found


def batch(dtype: Any = np.complex128) -> Any:
    return bg.bsr_batch([k * bg.bsr_array(dense(dtype), blocksize=(2, 2)) for k in (1, 2)])


def values(x: Any) -> list[Any]:
    """Everything that an object holds, as copies on the host."""
    if isinstance(x, bg.bsr_batch):
        return [x.get().data, x.get().toarray(), x.get().indices.copy(), x.get().indptr.copy()]
    if isinstance(x, bg.BlockMask):
        return [x.to_dense(), x.shape, x.block, x.heads]
    if isinstance(x, bg.KVCache):
        return [x.lengths, *(np.array(part) for k in range(2) for part in x.gathered(k))]
    if isinstance(x, bg.linalg.Preconditioner):
        return [x @ np.ones(x.shape[1]), x.shape, x.dtype]
    return [x.get().toarray(), x.shape, x.dtype, x.blocksize]


MAKERS: dict[str, Callable[[], Any]] = {
    "real array": lambda: bg.bsr_array(dense(np.float64), blocksize=(2, 2)),
    "complex array": lambda: bg.bsr_array(dense(), blocksize=(2, 2)),
    "transpose": lambda: bg.bsr_array(dense(), blocksize=(2, 2)).T,
    "matrix": lambda: bg.bsr_matrix(dense(), blocksize=(2, 2)),
    "batch": batch,
    "mask": lambda: bg.BlockMask.causal(64, 64, block=32),
    "cache": cache,
    "multigrid": lambda: bg.linalg.smoothed_aggregation(
        bg.bsr_array(2 * np.eye(40) - np.eye(40, k=1) - np.eye(40, k=-1), blocksize=(1, 1)), max_coarse=10
    ),
}
#: The arrays that define an object, which may be changed in place by contract.
OPEN = {"data", "indices", "indptr"}


def properties(x: Any) -> list[str]:
    found = (name for name in dir(type(x)) if not name.startswith("_"))
    return [name for name in found if isinstance(inspect.getattr_static(type(x), name), property)]


@pytest.mark.parametrize("step", ["x.{} *= 2", "x.{0} += x.{0}", "x.{} = None"])
@pytest.mark.parametrize("kind", MAKERS)
def test_what_a_property_refuses_has_changed_nothing(kind: str, step: str) -> None:
    made = MAKERS[kind]()
    names = [name for name in properties(made) if name not in OPEN]
    assert names
    for name in names:
        x = MAKERS[kind]()
        before = copy.deepcopy(values(x))
        try:
            exec(step.format(name), {"x": x})
        except (AttributeError, TypeError, ValueError):
            for found, want in zip(values(x), before, strict=True):
                np.testing.assert_array_equal(found, want, err_msg=f"{kind}.{name}: {step}")


def test_parts_of_a_complex_matrix_do_not_share_its_values() -> None:
    A = bg.bsr_array(dense(), blocksize=(2, 2))
    turned = A.T
    for part in (A.real, A.imag):
        part *= 7
        assert part.data.flags.c_contiguous
    np.testing.assert_array_equal(A.toarray(), dense())
    np.testing.assert_array_equal(turned.toarray(), dense().T)


@pytest.mark.fake
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_data_of_a_batch_can_be_multiplied_in_place(place: str) -> None:
    A = batch(np.float64)
    if place == "cuda":
        A = A.to_device("cuda")
    want, taken = 2 * A.get().toarray(), A[1]
    A.data *= 2
    x = A._backend.from_host(np.ones((2, 4)))
    np.testing.assert_array_equal(A.get().toarray(), want)
    np.testing.assert_array_equal(A._backend.to_host(A @ x), want.sum(axis=2))
    np.testing.assert_array_equal(taken.get().toarray(), want[1])  # it shares the data of the batch


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.complex128], ids=lambda d: d.__name__)
def test_data_of_a_batch_can_be_replaced(count: int, dtype: Any) -> None:
    A = batch(np.float64)
    taken, whole, before = A[0], A.tobsr(), A[0].toarray()
    data = np.random.default_rng(count).standard_normal((count, *A.data.shape[1:])).astype(dtype)
    A.data = data
    assert A.data is data and A.dtype == dtype and A.shape == (count, 4, 4) and len(A) == count
    want = np.stack([taken._with_data(one).toarray() for one in data])
    np.testing.assert_array_equal(A.toarray(), want)
    np.testing.assert_allclose(A @ np.ones((count, 4), dtype), want.sum(axis=2), rtol=1e-5)
    np.testing.assert_array_equal(A.tobsr().toarray()[-4:, -4:], want[-1])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(A)).toarray(), want)
    np.testing.assert_array_equal(taken.toarray(), before)  # those that were taken before keep the old numbers
    np.testing.assert_array_equal(whole.toarray()[:4, :4], before)
    data *= 3
    np.testing.assert_array_equal(A.toarray(), 3 * want)


@pytest.mark.parametrize(
    "data", [None, 3.0, [[1.0]], np.ones((2, 4, 2)), np.ones((2, 3, 2, 2)), np.ones((0, 4, 2, 2)), np.array(["a"])]
)
def test_data_that_do_not_fit_a_batch_are_refused_before_anything_changes(data: Any) -> None:
    A = batch(np.float64)
    before, kept = A.toarray(), A.data
    with pytest.raises((TypeError, ValueError), match="data: wanted"):
        A.data = data
    assert A.data is kept
    np.testing.assert_array_equal(A.toarray(), before)


def test_index_arrays_of_a_batch_are_refused_before_anything_changes() -> None:
    A = batch()
    before = A.toarray()
    for name in ("indices", "indptr"):
        for step in ("A.{} += 1", "A.{} = None", "A.{}[0] = 1"):
            with pytest.raises((AttributeError, ValueError)):
                exec(step.format(name), {"A": A})
    np.testing.assert_array_equal(A.toarray(), before)
