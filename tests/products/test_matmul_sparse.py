"""`matmul` of two sparse operands is ``A @ B``, and refuses the options that are for dense operands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import bsrgemm as bg
from bsrgemm._backend.base import Backend
from bsrgemm.dtypes import BFLOAT16


def operands(backend: Backend, dtype: Any = np.float64) -> tuple[Any, Any]:
    options: dict[str, Any] = {"density": 0.4, "dtype": dtype, "device": backend.name}
    return bg.random(8, 12, blocksize=(2, 3), seed=1, **options), bg.random(12, 10, blocksize=(3, 5), seed=2, **options)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, BFLOAT16, np.int8, np.complex64], ids=str)
def test_two_bsr_matrices_give_what_the_operator_gives(backend: Backend, dtype: Any) -> None:
    A, B = operands(backend, dtype)
    for left, right in ((A, B), (B.T, A.T), (A, B.T.T)):
        C, want = bg.matmul(left, right), left @ right
        assert type(C) is type(want) and C.shape == want.shape and C.blocksize == want.blocksize
        for ours, theirs in zip(C._blocks, want._blocks, strict=True):
            assert backend.to_host(ours).tobytes() == backend.to_host(theirs).tobytes()


def test_one_operand_may_have_another_format() -> None:
    A, B = operands(bg.bsr_array(np.eye(1))._backend)
    want = A.toarray() @ B.toarray()
    for left, right in ((A, B.tocsr()), (A.tocsr(), B), (A.tocoo(), B)):
        C = bg.matmul(left, right)
        assert isinstance(C, bg.bsr_array)
        np.testing.assert_allclose(C.toarray(), want, rtol=1e-13)


def test_options_for_dense_operands_are_refused(backend: Backend) -> None:
    A, B = operands(backend, np.float32)
    out = backend.xp.empty((8, 10), np.float32)
    for name, value in (
        ("out", out),
        ("out_dtype", np.float64),
        ("alpha", 2),
        ("beta", 1),
        ("precision", "tf32"),
        ("scale_a", 2.0),
        ("scale_b", 1.0),
    ):
        told = "scale_a or scale_b" if "scale" in name else name
        with pytest.raises(ValueError, match=rf"^{told}: is for a product with a dense array, and both"):
            bg.matmul(A, B, **{name: value})
    assert bg.matmul(A, B, out=None, alpha=1.0, beta=0.0).shape == (8, 10)


def test_operands_that_do_not_fit_are_told(backend: Backend) -> None:
    A, _ = operands(backend)
    with pytest.raises(ValueError, match="dimension mismatch"):
        bg.matmul(A, A)
    with pytest.raises(TypeError, match="wanted a bsr_array or bsr_matrix among the operands"):
        bg.matmul(sp.csr_array(np.eye(2)), sp.csr_array(np.eye(2)))
    if backend.name != "cpu":
        with pytest.raises(TypeError, match="moved silently"):
            bg.matmul(A, A.T.get())
