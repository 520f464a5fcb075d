"""What is assigned to `data`, `indices` and `indptr` is told at once if no matrix can have it, and works otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg

from .. import fake_cupy

pytestmark = pytest.mark.fake

BLOCKS = np.arange(1.0, 9).reshape(2, 2, 2)


def matrix(device: str = "cpu") -> Any:
    return bg.bsr_array((BLOCKS.copy(), [0, 1], [0, 1, 2]), shape=(4, 4)).to_device(device)


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        *((name, None, TypeError, f"{name}: wanted an array on 'cpu', got None") for name in ("data", "indptr")),
        ("data", 5, TypeError, "data: wanted an array on 'cpu', got an int"),
        ("data", "1", TypeError, "data: wanted an array on 'cpu', got a str"),
        ("data", np.ones(8), ValueError, "data: wanted shape (blocks, R, C), got (8,)"),
        ("data", [1.0, 2.0], ValueError, "data: wanted shape (blocks, R, C), got (2,)"),
        ("data", [[[1.0], [1.0, 2.0]]], ValueError, "data: wanted numbers in rows of one length, got a list of others"),
        ("data", BLOCKS.astype(object), TypeError, "data: does not support dtype object; wanted one of"),
        ("indices", [[0, 1]], ValueError, "indices: wanted shape (blocks,), got (1, 2)"),
        ("indices", np.array([0.0, 1.0]), TypeError, "indices: wanted integers, got float64"),
        ("indices", [False, True], TypeError, "indices: wanted integers, got bool"),
        ("indptr", [0.0, 1.0, 2.0], TypeError, "indptr: wanted integers, got float64"),
        ("indptr", np.int64(2), TypeError, "indptr: wanted an array on 'cpu', got numpy int64"),
        ("indptr", np.array(2), ValueError, "indptr: wanted shape (block rows + 1,), got ()"),
    ],
)
def test_what_no_matrix_can_have_is_refused_and_changes_nothing(
    name: str, value: Any, error: type[Exception], text: str
) -> None:
    A = matrix()
    before = A.toarray()
    for operand in (A, A.T):
        with pytest.raises(error) as caught:
            setattr(operand, name, value)
        assert str(caught.value).startswith(text)
    np.testing.assert_array_equal(A.toarray(), before)


def test_an_array_of_another_device_is_refused_with_the_way_there() -> None:
    here, there = matrix(), matrix("cuda")
    for A, B in ((here, there), (there, here)):
        for name in ("data", "indices", "indptr"):
            with pytest.raises(TypeError, match=rf"^{name}: wanted an array on '{A._backend.name}', got \w+ .*; Bring"):
                setattr(A, name, getattr(B, name))
    with pytest.raises(TypeError, match=r"^indices: wanted an array on 'cuda', got a list"):
        there.indices = [0, 1]


def test_lists_are_taken_on_the_host() -> None:
    A = matrix()
    A.indices = [1, 0]
    np.testing.assert_array_equal(A.toarray(), np.block([[np.zeros((2, 2)), BLOCKS[0]], [BLOCKS[1], np.zeros((2, 2))]]))
    A.indptr = (0, 0, 2)
    A.data = BLOCKS.tolist()
    np.testing.assert_array_equal(A @ np.ones(4), [0, 0, *BLOCKS.sum((0, 2))])
    A.data, A.indices, A.indptr = np.zeros((0, 2, 2)), [], [0, 0, 0]
    assert A.nnz == 0 and not A.toarray().any() and A.indices.dtype.kind == "i"


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32", "uint64", "int32", "int64"])
def test_integers_of_every_width_are_indices(dtype: str) -> None:
    for device in ("cpu", "cuda"):
        A = matrix(device)
        A.indices = new = A._backend.from_host(np.array([1, 0], dtype))
        assert A.indices.dtype in (np.int32, np.int64)
        assert dtype not in ("int32", "int64") or A.indices is new
        np.testing.assert_array_equal(A._backend.to_host(A @ A._backend.from_host(np.ones(4))), BLOCKS.sum(2).ravel())


def test_arrays_of_other_lengths_are_assigned_one_after_the_other_and_told_when_they_are_used() -> None:
    """No order of the three assignments would be right if the first had to fit the others."""
    A = matrix()
    A.indices = np.array([0, 1, 0], np.int32)
    with pytest.raises(ValueError, match="indices and data should have the same size, got 3 indices and 2 blocks"):
        A.toarray()
    A.data = np.ones((3, 2, 2))
    A.indptr = np.array([0, 2, 3], np.int32)
    np.testing.assert_array_equal(A.sum(axis=1), [4, 4, 2, 2])


def test_arrays_that_fit_are_kept_without_a_copy() -> None:
    A = matrix()
    data, indices, indptr = BLOCKS * 2, np.array([1, 0], np.int64), np.array([0, 1, 2], np.int64)
    A.data, A.indices, A.indptr = data, indices, indptr
    assert A.data is data and A.indices is indices and A.indptr is indptr
    A.data *= 2
    assert A.data is data
    A.data = data.astype(">f8")
    assert A.data.dtype == np.float64 and A.data.dtype.isnative


def test_new_index_arrays_are_not_taken_over_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be copied when the graph runs, and be read before. Once they are taken over, a graph may read them."""
    A, x = matrix("cuda"), fake_cupy.xp.asarray(np.ones(4))
    want = (A @ x).get()
    for name in ("indices", "indptr"):
        setattr(A, name, getattr(A, name).copy())
        with monkeypatch.context() as capture:
            capture.setattr(type(fake_cupy.backend()), "is_recording", lambda self: True)
            with pytest.raises(RuntimeError, match=r"^indices, indptr: new arrays were assigned.*before the capture$"):
                A @ x
        A @ x
        with monkeypatch.context() as capture:
            capture.setattr(type(fake_cupy.backend()), "is_recording", lambda self: True)
            np.testing.assert_array_equal((A @ x).get(), want)
