"""Every argument that a product refuses, with the kind of error and its text, and neighbours that it takes."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from ml_dtypes import float8_e4m3fn

import bsrgemm as bg
from bsrgemm._products import matmul as matmul_module
from bsrgemm.dtypes import BFLOAT16

from .. import fake_cupy

pytestmark = pytest.mark.fake

A = bg.bsr_array(np.arange(24.0).reshape(4, 6), blocksize=(2, 3))
I = A.astype(np.int64)  # noqa: E741
S = A.astype(np.float32)
BOOLS = A.astype(bool)
BYTES = bg.bsr_array(np.ones((4, 6), np.uint8), blocksize=(2, 3))
TWICE = bg.bsr_array((np.ones((2, 2, 3)), [0, 0], [0, 2, 2]), shape=(4, 6))
TWICE_BYTES = bg.bsr_array((np.ones((2, 2, 3), np.int8), [0, 0], [0, 2, 2]), shape=(4, 6))
B = np.ones((6, 2))
OUT = np.zeros((4, 2))
SCIPY = scipy.sparse.bsr_array(A.toarray(), blocksize=(2, 3))


def made(Class: Any = bg.bsr_array, **how: Any) -> Any:
    return Class(np.ones((4, 6)), blocksize=how.get("blocksize", (2, 3)))


def overlapping(name: str) -> Callable[[], Any]:
    """A product whose result lies in an array of the matrix."""

    def call() -> Any:
        room = np.zeros(64)
        if name == "B":
            return bg.matmul(A, room[:12].reshape(6, 2), out=room[4:12].reshape(4, 2))
        data, indices, indptr = np.ones((2, 1, 1)), np.array([0, 1]), np.array([0, 1, 2])
        arrays = {"data": data, "indices": indices, "indptr": indptr}
        arrays[name] = room[: arrays[name].size].view(arrays[name].dtype).reshape(arrays[name].shape)
        arrays[name][...] = {"data": data, "indices": indices, "indptr": indptr}[name]
        own = bg.bsr_array(tuple(arrays.values()), shape=(2, 2))
        return bg.matmul(own, np.ones(2), out=room[:2])

    return call


def read_only() -> np.ndarray[Any, Any]:
    out = np.zeros((4, 2))
    out.flags.writeable = False
    return out


REFUSED: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    # operands of matmul
    "no matrix": (
        TypeError,
        "A, B: wanted a bsr_array or bsr_matrix among the operands, got ndarray and list",
        lambda: bg.matmul(B, [1]),
    ),
    "rows of B": (ValueError, r"dimension mismatch: A is \(4, 6\), B is \(5, 2\)", lambda: bg.matmul(A, B[:5])),
    "a vector": (ValueError, r"dimension mismatch: A is \(4, 6\), B is \(5,\)", lambda: bg.matmul(A, B[:5, 0])),
    "columns of A": (
        ValueError,
        r"dimension mismatch: A is \(2, 5\), B is \(4, 6\)",
        lambda: bg.matmul(np.ones((2, 5)), A),
    ),
    "rows of a batch": (ValueError, "dimension mismatch", lambda: bg.matmul(A, np.ones((2, 5, 6)))),
    "columns by the operator": (ValueError, r"mismatch: other is \(6, 2\), self is \(4, 6\)", lambda: B @ A),
    "rows by the operator": (ValueError, r"dimension mismatch: self is \(4, 6\), other is \(5, 2\)", lambda: A @ B[:5]),
    "no array": (TypeError, "B: wanted a dense array on 'cpu', got object", lambda: bg.matmul(A, object())),
    "a dtype": (TypeError, "B: does not support dtype", lambda: bg.matmul(A, np.array(["x"] * 6))),
    "no dimensions": (
        ValueError,
        r"B: wanted 1, 2 or 3 dimensions, got 0 in shape \(\)",
        lambda: bg.matmul(A, np.array(2.0)),
    ),
    "four dimensions": (
        ValueError,
        "B: wanted 1, 2 or 3 dimensions, got 4",
        lambda: bg.matmul(A, np.ones((1, 1, 6, 2))),
    ),
    "a scalar": (ValueError, r"Scalar operands are not allowed, use '\*' instead", lambda: A @ 2),
    "a scalar on the left": (ValueError, r"Scalar operands are not allowed, use '\*' instead", lambda: 2 @ A),
    "a sparse shape": (ValueError, r"matmul: dimension mismatch: \(4, 6\) and \(4, 6\)", lambda: A @ A),
    # options of matmul
    "an option of sparse operands": (
        ValueError,
        "alpha: is for a product with a dense array",
        lambda: bg.matmul(A, A.T, alpha=2),
    ),
    "a result of sparse operands": (ValueError, "out: is for a product", lambda: bg.matmul(A, A.T, out=OUT)),
    "a scale of sparse operands": (ValueError, "scale_a or scale_b: is for", lambda: bg.matmul(A, A.T, scale_a=1)),
    "an option of a sparse left one": (
        ValueError,
        "beta: is for",
        lambda: bg.matmul(scipy.sparse.eye_array(4), A, beta=1),
    ),
    "no result array": (
        TypeError,
        "out: wanted a dense array on 'cpu', got a list",
        lambda: bg.matmul(A, B, out=[[0.0, 0]] * 4),
    ),
    "the shape of out": (
        ValueError,
        r"out: wanted float64 of shape \(4, 2\), got float64 of shape \(2, 4\)",
        lambda: bg.matmul(A, B, out=np.zeros((2, 4))),
    ),
    "the dtype of out": (
        ValueError,
        r"out: wanted float32 of shape \(4, 2\), got float64",
        lambda: bg.matmul(S, B.astype("f"), out=OUT, out_dtype="f"),
    ),
    "the shape of a left one": (
        ValueError,
        r"out: wanted float64 of shape \(3, 6\)",
        lambda: bg.matmul(np.ones((3, 4)), A, out=np.zeros((6, 3))),
    ),
    "the shape of a batch": (
        ValueError,
        r"out: wanted float64 of shape \(2, 3, 6\)",
        lambda: bg.matmul(np.ones((2, 3, 4)), A, out=np.zeros((2, 6, 3))),
    ),
    "read-only": (ValueError, "out: array is read-only", lambda: bg.matmul(A, B, out=read_only())),
    "shared elements": (
        ValueError,
        "out: elements share memory",
        lambda: bg.matmul(A, B, out=np.lib.stride_tricks.as_strided(np.zeros(4), (4, 2), (8, 0))),
    ),
    "out is B": (ValueError, "out: overlaps B$", overlapping("B")),
    "out is data": (ValueError, r"out: overlaps A\.data$", overlapping("data")),
    "out is indices": (ValueError, r"out: overlaps A\.indices$", overlapping("indices")),
    "out is indptr": (ValueError, r"out: overlaps A\.indptr$", overlapping("indptr")),
    "beta alone": (ValueError, "beta: got 1 without an `out`", lambda: bg.matmul(A, B, beta=1)),
    "a narrow result": (
        TypeError,
        "out_dtype: int64 cannot hold a product of float64 and float64",
        lambda: bg.matmul(A, B, out_dtype=int),
    ),
    "a real result": (
        TypeError,
        "out_dtype: float32 cannot hold a product of float64 and complex128",
        lambda: bg.matmul(A, 1j * B, out_dtype="f"),
    ),
    "an unsigned result": (
        TypeError,
        "out_dtype: uint64 cannot hold",
        lambda: bg.matmul(I, B.astype(int), out_dtype="L"),
    ),
    "an unknown dtype": (TypeError, "out_dtype: does not support dtype", lambda: bg.matmul(A, B, out_dtype="U3")),
    "precision": (
        ValueError,
        "precision: wanted 'float32', 'tf32' or None, got 'tf16'",
        lambda: bg.matmul(S, B, precision="tf16"),
    ),
    "precision of no text": (
        TypeError,
        "precision: wanted 'float32', 'tf32' or None, got 32",
        lambda: bg.matmul(S, B, precision=32),
    ),
    "precision of doubles": (
        ValueError,
        "precision: 'tf32' is for products in float32 and complex64, got float64 and float64, summed in float64",
        lambda: bg.matmul(A, B, precision="tf32"),
    ),
    "precision of two dtypes": (
        ValueError,
        "got float64 and float32, summed in float64",
        lambda: bg.matmul(A, B.astype("f"), precision="tf32"),
    ),
    "precision of a sampled product": (
        ValueError,
        "got float64 and float32, summed in float64",
        lambda: bg.sddmm(np.ones((4, 2)), np.ones((2, 6), "f"), A, precision="tf32"),
    ),
    "a sampled product of two dtypes": (
        TypeError,
        "out_dtype: float32 cannot hold a product of float64 and complex128",
        lambda: bg.sddmm(np.ones((4, 2)), np.ones((2, 6), "D"), A, out_dtype="f"),
    ),
    "alpha": (TypeError, "alpha: wanted a number, got str", lambda: bg.matmul(A, B, alpha="1")),
    "an array": (TypeError, "beta: wanted a number, got ndarray", lambda: bg.matmul(A, B, out=OUT, beta=np.ones(1))),
    "a complex factor": (
        TypeError,
        r"alpha: got the complex 1j for a result of dtype float64",
        lambda: bg.matmul(A, B, alpha=1j),
    ),
    "a complex scalar": (TypeError, r"beta: got the complex", lambda: bg.matmul(A, B, out=OUT, beta=np.complex64(1))),
    "a fraction of integers": (
        TypeError,
        "alpha: got 0.5 for a result of dtype int64, wanted an integer",
        lambda: bg.matmul(I, B.astype(int), alpha=0.5),
    ),
    "a boolean factor": (
        TypeError,
        "alpha: got 2 for a boolean result, wanted 0 or 1",
        lambda: bg.matmul(BOOLS, B > 0, alpha=2),
    ),
    # fp8
    "a scale": (
        TypeError,
        "scale_a: wanted a real number, got complex",
        lambda: bg.matmul(BYTES, B.astype("B"), scale_a=1j),
    ),
    "another scale": (
        TypeError,
        "scale_b: wanted a real number, got str",
        lambda: bg.matmul(BYTES, B.astype("B"), scale_b="1"),
    ),
    "a scale of floats": (
        TypeError,
        "A: wanted fp8 numbers as uint8, since a scale is given, got float64",
        lambda: bg.matmul(A, B.astype("B"), scale_a=1),
    ),
    "a scale of a dense operand": (
        TypeError,
        "B: wanted fp8 numbers as uint8, since a scale is given, got float64",
        lambda: bg.matmul(BYTES, B, scale_a=1),
    ),
    "precision of fp8": (
        ValueError,
        "precision: 'tf32' is for products in float32 and complex64, got fp8",
        lambda: bg.matmul(BYTES, B.astype("B"), scale_a=1, precision="tf32"),
    ),
    "a result of fp8": (
        TypeError,
        "out_dtype: wanted float32, float16, bfloat16 for a product of fp8, got float64",
        lambda: bg.matmul(BYTES, B.astype("B"), scale_a=1, out_dtype="d"),
    ),
    # sampled products
    "no pattern": (TypeError, "pattern: wanted a bsr_array or bsr_matrix, got ndarray", lambda: bg.sddmm(B, B, B)),
    "rows of X": (ValueError, "sddmm: dimension mismatch", lambda: bg.sddmm(np.ones((3, 2)), np.ones((2, 6)), A)),
    "columns of Y": (ValueError, "sddmm: dimension mismatch", lambda: bg.sddmm(np.ones((4, 2)), np.ones((2, 5)), A)),
    "the inner side": (ValueError, "sddmm: dimension mismatch", lambda: bg.sddmm(np.ones((4, 2)), np.ones((3, 6)), A)),
    "a vector X": (
        ValueError,
        r"X: wanted 2 dimensions, got 1 in shape \(4,\)",
        lambda: bg.sddmm(np.ones(4), np.ones((2, 6)), A),
    ),
    "a batch Y": (
        ValueError,
        "Y: wanted 2 dimensions, got 3",
        lambda: bg.sddmm(np.ones((4, 2)), np.ones((1, 2, 6)), A),
    ),
    "no matrix out": (
        TypeError,
        "out: wanted a bsr_array or bsr_matrix on 'cpu', got ndarray",
        lambda: sampled(out=OUT),
    ),
    "a device of out": (TypeError, "out: wanted a bsr_array or bsr_matrix on 'cpu'", lambda: sampled(out=elsewhere())),
    "a sampled dtype": (
        ValueError,
        "out: wanted dtype float64, got float32",
        lambda: sampled(out=S.copy(), out_dtype="d"),
    ),
    "a sampled shape": (
        ValueError,
        r"out: wanted the shape of the pattern, \(4, 6\), got \(4, 3\)",
        lambda: sampled(out=A[:, :3]),
    ),
    "a sampled block": (
        ValueError,
        r"out: wanted the blocksize of the pattern, \(2, 3\), got \(2, 2\)",
        lambda: sampled(out=made(blocksize=(2, 2))),
    ),
    "other blocks": (
        ValueError,
        "out: wanted the blocks of the pattern, got other indices",
        lambda: sampled(out=bg.bsr_array((np.ones((1, 2, 3)), [0], [0, 1, 1]), shape=(4, 6))),
    ),
    "other rows": (
        ValueError,
        "out: wanted the blocks of the pattern, got other indptr",
        lambda: sampled(out=bg.bsr_array((np.ones((4, 2, 3)), [0, 1, 0, 1], [0, 4, 4]), shape=(4, 6))),
    ),
    "sampled beta": (ValueError, "beta: got 2 without an `out`", lambda: sampled(beta=2)),
    "a block twice": (
        ValueError,
        "pattern: holds a block twice",
        lambda: bg.sddmm(np.ones((4, 2)), np.ones((2, 6)), TWICE, out=TWICE.copy()),
    ),
    "sampled precision": (ValueError, "precision: wanted", lambda: sampled(precision="tf16")),
    # classes of scipy, which have our names
    "a pattern of scipy": (
        TypeError,
        r"pattern: wanted a bsr_array or bsr_matrix, got scipy bsr_array; bsrgemm.bsr_array\(pattern\) makes one",
        lambda: bg.sddmm(np.ones((4, 2)), np.ones((2, 6)), SCIPY),
    ),
    "an out of scipy": (TypeError, "out: .* on 'cpu', got scipy bsr_array", lambda: sampled(out=SCIPY)),
    "a product of scipy": (
        TypeError,
        "among the operands, got scipy bsr_array and ndarray",
        lambda: bg.matmul(SCIPY, B),
    ),
    "gradients of scipy": (
        TypeError,
        "A: wanted a bsr_array or bsr_matrix, got scipy bsr_array, and B .* but ndarray",
        lambda: bg.matmul_backward(OUT, SCIPY, B),
    ),
    "a gradient of scipy": (
        TypeError,
        r"dS: wanted a bsr_array or bsr_matrix, got scipy bsr_array; bsrgemm.bsr_array\(dS\) makes one",
        lambda: bg.sddmm_backward(SCIPY, np.ones((4, 2)), np.ones((2, 6)), A),
    ),
    "a plan of scipy": (
        TypeError,
        r"A: wanted a bsr_array or bsr_matrix, got scipy bsr_array; bsrgemm.bsr_array\(A\) makes one",
        lambda: bg.plan(SCIPY, A.T),
    ),
    "a matrix of scipy for a plan": (TypeError, "got scipy bsr_array", lambda: bg.plan(A, A.T)(SCIPY, A.T)),
    "tuning of scipy": (TypeError, r"got scipy bsr_array; bsrgemm.bsr_array\(A\)", lambda: bg.tune(SCIPY, 8)),
    "stacking of scipy": (TypeError, "got scipy bsr_array, scipy bsr_array", lambda: bg.vstack([SCIPY, SCIPY])),
    "kron of scipy": (TypeError, "got scipy bsr_array and scipy bsr_array", lambda: bg.kron(SCIPY, SCIPY)),
    "no kind of matrix": (TypeError, "B: wanted a bsr_array or bsr_matrix, got NoneType$", lambda: bg.plan(A, None)),
    # plans
    "a plan of no matrix": (TypeError, "A: wanted a bsr_array or bsr_matrix, got ndarray", lambda: bg.plan(B, A)),
    "a plan with no matrix": (TypeError, "B: wanted a bsr_array or bsr_matrix, got ndarray", lambda: bg.plan(A, B)),
    "a plan of two shapes": (
        ValueError,
        r"plan: dimension mismatch: A is \(4, 6\), B is \(4, 6\)",
        lambda: bg.plan(A, A),
    ),
    "a plan of two blocks": (
        ValueError,
        r"B: wanted blocks of 3 rows, as A's have columns, got \(2, 2\)",
        lambda: bg.plan(A, A.T.tobsr((2, 2))),
    ),
    "no matrix for a plan": (
        TypeError,
        "B: wanted a bsr_array or bsr_matrix on 'cpu', got ndarray",
        lambda: bg.plan(A, A.T)(A, B),
    ),
    "another shape for a plan": (
        ValueError,
        r"B: wanted the shape of the plan, \(6, 4\), got \(6, 2\)",
        lambda: bg.plan(A, A.T)(A, A.T[:, :2]),
    ),
    "another block for a plan": (
        ValueError,
        r"B: wanted the blocksize of the plan, \(3, 2\), got \(3, 1\)",
        lambda: bg.plan(A, A.T)(A, A.T.tobsr((3, 1))),
    ),
    "other columns for a plan": (
        ValueError,
        "A: wanted the blocks of the plan, got other indices",
        lambda: bg.plan(A, A.T)(TWICE, A.T),
    ),
    "other rows for a plan": (
        ValueError,
        "A: wanted the blocks of the plan, got other indptr",
        lambda: bg.plan(A, A.T)(bg.bsr_array((A.data, A.indices, [0, 1, 4]), shape=(4, 6)), A.T),
    ),
    "a block twice for a plan": (
        ValueError,
        r"A: holds a block twice, in int8; call A.sum_duplicates\(\) first",
        lambda: bg.plan(TWICE_BYTES, A.T)(TWICE_BYTES, A.T),
    ),
    # gradients, factors of blocks
    "a gradient of no matrix": (
        TypeError,
        "A: wanted a bsr_array or bsr_matrix, got ndarray",
        lambda: bg.matmul_backward(B, B, B),
    ),
    "a gradient of another shape": (
        ValueError,
        "matmul_backward: dimension mismatch",
        lambda: bg.matmul_backward(np.ones((4, 3)), A, B),
    ),
    "rows of a gradient": (
        ValueError,
        "matmul_backward: dimension mismatch",
        lambda: bg.matmul_backward(np.ones((5, 2)), A, B),
    ),
    "rows of a gradient's B": (
        ValueError,
        "matmul_backward: dimension mismatch",
        lambda: bg.matmul_backward(OUT, A, B[:5]),
    ),
    "no factor": (TypeError, "D: wanted a dense array on 'cpu', got", lambda: A.scale_block_rows(A)),
    "a factor of another shape": (
        ValueError,
        r"D: wanted shape \(2,\), \(2, 2\) or \(2, 2, 2\) for 2 block rows of 2 rows, got \(3,\)",
        lambda: A.scale_block_rows(np.ones(3)),
    ),
    "a factor of columns": (
        ValueError,
        r"D: wanted shape \(2,\), \(2, 3\) or \(2, 3, 3\) for 2 block columns of 3 columns, got \(2, 2\)",
        lambda: A.scale_block_cols(np.ones((2, 2))),
    ),
    "a dtype of a factor": (TypeError, "D: does not support dtype", lambda: A.scale_block_rows(np.array(["x", "y"]))),
    # tuning
    "no matrix to tune": (TypeError, "A: wanted a bsr_array or bsr_matrix, got ndarray", lambda: bg.tune(B, 3)),
    "a matrix of the host": (TypeError, "A: wanted a BSR matrix on the GPU, got one on 'cpu'", lambda: bg.tune(A, 3)),
}


def sampled(**options: Any) -> Any:
    return bg.sddmm(np.ones((4, 2)), np.ones((2, 6)), A, **options)


def elsewhere() -> Any:
    return A.to_device(fake_cupy.backend().name)


@pytest.mark.parametrize("case", REFUSED)
def test_an_argument_that_does_not_fit_is_refused(case: str) -> None:
    kind, message, call = REFUSED[case]
    with pytest.raises(kind, match=message) as raised:
        call()
    assert type(raised.value) is kind


# ------------------------------------------------------------------------------------------------ neighbours
def test_factors_that_a_dtype_can_hold_are_taken() -> None:
    checked = matmul_module.checked_factor
    for x, dtype in (
        *((x, d) for x in (2, 2.0, np.int8(2), np.array(2), Fraction(2), np.float32(2)) for d in "ldFD"),
        *((x, "?") for x in (0, 1, True, 1.0, np.bool_(False))),
        *((x, BFLOAT16) for x in (1.5, 2, np.float64(2))),
        (1j, "F"),
        (0.5, "f"),
        (3.0, "B"),
    ):
        found = checked(x, np.dtype(dtype), "alpha")
        assert found == x and not isinstance(found, np.generic | np.ndarray)


@pytest.mark.parametrize(
    "promoted, dtype, held",
    [
        *(
            (a, b, True)
            for a, b in ("?b", "bh", "bf", "Bh", "lf", "fd", "df", "fD", "de", "BB", "?B", "hb", "lb", "LB")
        ),
        *((a, b, False) for a, b in ("b?", "bB", "hL", "Bb", "Ll", "fl", "Fd", "d?", "Ih", "Ii")),
        ("Il", "l", True),
        ("d", BFLOAT16, True),
        (BFLOAT16, "l", False),
        (BFLOAT16, "e", True),
    ],
)
def test_which_dtype_may_hold_a_product(promoted: Any, dtype: Any, held: bool) -> None:
    promoted = promoted[0] if isinstance(promoted, str) else promoted
    assert matmul_module._can_hold(np.dtype(promoted), np.dtype(dtype)) == held


def test_scales_are_numbers_of_any_library() -> None:
    for x in (2, 2.0, np.float32(2), np.array(2), np.int64(2), Fraction(2), True):
        found = matmul_module._scale(x, "scale_a")
        assert found == x and type(found) is float
    assert matmul_module._scale(None, "scale_a") == 1.0
    with pytest.raises(TypeError, match="scale_b: wanted a real number, got ndarray"):
        matmul_module._scale(np.ones(2), "scale_b")


@pytest.mark.parametrize("scales", [{"scale_a": 2}, {"scale_b": 3}, {"scale_a": 2, "scale_b": 3}], ids=str)
@pytest.mark.parametrize("out_dtype", [None, "f", "e", BFLOAT16], ids=str)
def test_fp8_is_scaled_and_summed_in_float32(scales: dict[str, int], out_dtype: Any) -> None:
    x = np.array([[0.5, 1], [2, 4]], np.float32)
    own = bg.bsr_array(x.astype(float8_e4m3fn).view("B"), blocksize=(1, 2))
    for dense in (x.astype(float8_e4m3fn), x.astype(float8_e4m3fn).view("B")):
        found = bg.matmul(own, dense, alpha=2, out_dtype=out_dtype, **scales)
        assert found.dtype == np.dtype(out_dtype or "f")
        factor = 2 * scales.get("scale_a", 1) * scales.get("scale_b", 1)
        np.testing.assert_array_equal(found.astype("f"), factor * (x @ x))
        out = np.ones((2, 2), found.dtype)
        assert bg.matmul(own, dense, out=out, beta=3, **scales) is out
        np.testing.assert_array_equal(out.astype("f"), factor / 2 * (x @ x) + 3)


@pytest.mark.parametrize(
    "text, want", [("0", None), ("1", "tf32"), ("2", "tf32"), ("-1", None), (None, None), ("yes", ValueError)]
)
def test_the_environment_may_ask_for_tf32(text: str | None, want: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if text is None:
        monkeypatch.delenv("CUPY_TF32", raising=False)
    else:
        monkeypatch.setenv("CUPY_TF32", text)
    matmul_module._default_precision.cache_clear()
    try:
        if want is ValueError:
            with pytest.raises(
                ValueError, match="CUPY_TF32: wanted an integer in this environment variable, got 'yes'"
            ):
                matmul_module._default_precision()
            return
        assert matmul_module._default_precision() == want
        single = [np.dtype("f")] * 3
        assert matmul_module.checked_precision(None, True, *single) == want
        assert matmul_module.checked_precision("float32", True, *single) == "float32"
        assert matmul_module.checked_precision(None, False, *single) is None
    finally:
        matmul_module._default_precision.cache_clear()


@pytest.mark.parametrize(
    "a, x, wanted, dtype, acc, single",
    [
        ("f", "f", None, "f", "f", True),
        ("F", "f", None, "F", "F", True),
        ("f", "f", "d", "d", "d", False),
        ("e", "e", None, "e", "f", False),
        ("e", "e", "f", "f", "f", False),
        ("e", "f", None, "f", "f", True),
        ("b", "b", "i", "i", "i", False),
        ("d", "d", "f", "f", "d", False),
        ("d", "f", None, "d", "d", False),
        ("e", "b", "F", "F", "F", False),
    ],
)
def test_dtypes_of_a_product(a: str, x: str, wanted: str | None, dtype: str, acc: str, single: bool) -> None:
    found = matmul_module.product_dtypes(np.dtype(a), np.dtype(x), None if wanted is None else np.dtype(wanted))
    assert found == (np.dtype(dtype), np.dtype(acc), single)


def test_options_at_their_defaults_are_taken_for_two_sparse_operands() -> None:
    want = (A @ A.T).toarray()
    found = bg.matmul(A, A.T, out=None, out_dtype=None, alpha=1.0, beta=0.0, precision=None)
    np.testing.assert_array_equal(found.toarray(), want)
    np.testing.assert_array_equal(bg.matmul(scipy.sparse.csr_array(A.toarray()), A.T).toarray(), want)
    np.testing.assert_array_equal(bg.matmul(A, scipy.sparse.csr_array(A.T.toarray())).toarray(), want)


def test_a_result_may_have_strides_of_zero_where_there_is_one_element() -> None:
    out = np.lib.stride_tricks.as_strided(np.zeros(8), (4, 1), (16, 0))
    bg.matmul(A, B[:, :1], out=out)
    np.testing.assert_array_equal(out, A.toarray() @ B[:, :1])


def test_old_values_that_are_not_asked_for_are_not_read() -> None:
    out = A.copy()
    out.data[...] = np.nan
    found = bg.sddmm(np.ones((4, 2)), np.ones((2, 6)), A, out=out, alpha=3)
    assert found is out and (out.toarray() == 6).all()
    dense = np.full((4, 2), np.nan)
    for alpha in (1, 3):
        np.testing.assert_array_equal(bg.matmul(A, B, out=dense, alpha=alpha), alpha * (A.toarray() @ B))


def test_sampled_products_are_scaled_and_added() -> None:
    for alpha, beta in ((1, 0), (1, 2), (3, 0), (3, -1), (0, 1)):
        out = A.copy()
        bg.sddmm(np.ones((4, 2)), np.ones((2, 6)), A, out=out, alpha=alpha, beta=beta)
        np.testing.assert_array_equal(out.toarray(), 2 * alpha + beta * A.toarray())


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_factors_of_blocks_have_any_byte_order_and_class(rows: bool, lazy: bool) -> None:
    own = A.T if lazy else A
    n, length = own.shape[0 if rows else 1] // own.blocksize[0 if rows else 1], own.blocksize[0 if rows else 1]
    scale = own.scale_block_rows if rows else own.scale_block_cols
    numbers = np.arange(1.0, n * length * length + 1)
    for factor in (numbers[:n], numbers[: n * length].reshape(n, length), numbers.reshape(n, length, length)):
        whole = np.zeros((n * length, n * length))
        for k in range(n):
            block = factor[k] * np.eye(length) if factor.ndim == 1 else factor[k]
            here = slice(k * length, (k + 1) * length)
            whole[here, here] = np.diag(block) if factor.ndim == 2 else block
        want = whole @ own.toarray() if rows else own.toarray() @ whole
        for given in (factor, factor.astype(">f8"), *([np.asmatrix(factor)] if factor.ndim == 2 else [])):
            np.testing.assert_array_equal(scale(given).toarray(), want)
        assert scale(factor.astype("f")).dtype == np.float64
