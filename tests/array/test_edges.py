"""What the array refuses, and what it keeps of its operands, on the host; each was once noticed by no test."""

from __future__ import annotations

import builtins
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse

import bsrgemm as bg
from bsrgemm import bsr
from bsrgemm._array import assemble, extremes, reduce
from bsrgemm._array.arithmetic import FIXED_POINT_FUNCTIONS
from bsrgemm._array.construct import _index_array
from bsrgemm._array.convert import full_shape
from bsrgemm._backend import registry, structure
from bsrgemm._backend.base import Blocks
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm.dtypes import BFLOAT16, scalar_result_dtype


def duplicated(dtype: Any = float) -> Any:
    """A matrix with two blocks at one place: 1.5 and -4 add up to -2.5."""
    data = np.array([1.5, -4, 3]).astype(dtype).reshape(3, 1, 1)
    return bg.bsr_array((data, np.array([0, 0, 1]), np.array([0, 2, 3])), shape=(2, 2))


# ------------------------------------------------------------------------------------------------ elements
@pytest.mark.parametrize("name", FIXED_POINT_FUNCTIONS)
def test_functions_that_keep_zero_are_methods(name: str) -> None:
    values = np.array([[0.25, 0.0], [0.0, 0.75]])
    A = bg.bsr_array(values, blocksize=(1, 1))
    method = getattr(A, name)
    np.testing.assert_array_equal(method().toarray(), getattr(np, name)(values))
    assert method.__name__ == name and method.__qualname__.endswith(f".{name}") and f"numpy.{name}" in method.__doc__
    half = getattr(A.astype(BFLOAT16), name)()
    assert half.dtype == BFLOAT16


def test_a_function_of_a_sum_is_that_of_the_whole_sum() -> None:
    assert abs(duplicated()).toarray()[0, 0] == 2.5
    A = duplicated()
    A.data[:2] = 1.4
    assert round(A).toarray()[0, 0] == 3.0
    assert duplicated().floor().toarray()[0, 0] == -3.0
    assert duplicated().maximum(0).toarray()[0, 0] == 0.0


def test_a_boolean_has_no_sign() -> None:
    with pytest.raises(TypeError, match="sign: not defined for booleans"):
        bg.bsr_array(np.eye(2, dtype=bool), blocksize=(1, 1)).sign()


def test_an_operand_of_no_known_class_has_no_maximum() -> None:
    A = bg.bsr_array(np.eye(2), blocksize=(1, 1))
    for name in ("maximum", "minimum"):
        with pytest.raises(NotImplementedError, match=f"{name} with an unrecognized array type"):
            getattr(A, name)(object())


@pytest.mark.parametrize("form", ["csr", "coo", "bsr"])
def test_a_column_of_another_format_meets_a_row(form: str) -> None:
    row, column = np.array([[1.0, 0, 3]]), np.array([[2.0], [0], [5]])
    A = bg.bsr_array(row, blocksize=(1, 1))
    other = getattr(scipy.sparse, f"{form}_array")(column)
    np.testing.assert_array_equal(A.multiply(other).toarray(), row * column)
    turned = bg.bsr_array(column, blocksize=(1, 1)).multiply(getattr(scipy.sparse, f"{form}_array")(row))
    np.testing.assert_array_equal(turned.toarray(), row * column)


@pytest.mark.parametrize("tiny", [5e-324, 1e-310])
def test_an_inverse_that_is_finite_in_parts_is_refused(tiny: float) -> None:
    A = bg.bsr_array(np.diag([2.0, 4.0, tiny, 1.0]), blocksize=(2, 2))
    with pytest.raises(np.linalg.LinAlgError, match="block 1 is singular in float64: its inverse is not finite"):
        A.inverse_block_diagonal()


def test_an_inverse_of_what_is_not_finite_is_not_refused() -> None:
    A = bg.bsr_array(np.array([[np.inf, 0], [0, 1.0]]), blocksize=(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert A.inverse_block_diagonal().shape == (2, 2)


# ------------------------------------------------------------------------------------------------ axes and shapes
@pytest.mark.parametrize(
    "axis, message",
    [
        ((), "does not accept 0D axis"),
        ((0, 1, None), "tuple has too many elements"),
        ((0, 0), "duplicate value"),
        ((0, -2), "duplicate value"),
        (2, "axis out of range: got 2"),
        (-3, "axis out of range: got -3"),
    ],
    ids=str,
)
def test_an_axis_that_is_none_is_refused(axis: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        extremes.axis_of(axis)
    with pytest.raises(ValueError, match=message):
        bg.bsr_array(np.eye(2), blocksize=(1, 1)).sum(axis=axis)


def test_axes_are_counted_from_either_end() -> None:
    assert [extremes.axis_of(x) for x in (None, 0, 1, -1, -2, (1,), (0, 1), np.int8(1))] == [
        None,
        0,
        1,
        1,
        0,
        1,
        None,
        1,
    ]
    for wrong in (True, 1.0, "0"):
        with pytest.raises(TypeError, match="axis must be an integer"):
            extremes.axis_of(wrong)


@pytest.mark.parametrize("shape, size", [((-1, 0), 6), ((4, -1), 6), ((2, 2), 6), ((), 6)], ids=str)
def test_a_shape_of_another_size_is_refused(shape: tuple[int, ...], size: int) -> None:
    with pytest.raises(ValueError, match=f"cannot reshape array of size {size} into shape"):
        full_shape(shape, size)


def test_a_side_that_is_left_open_is_found() -> None:
    assert full_shape((3, -1), 6) == (3, 2) and full_shape((-1,), 6) == (6,) and full_shape((-1, 2), 0) == (0, 2)
    with pytest.raises(ValueError, match="can only specify one unknown dimension"):
        full_shape((-1, -1), 6)
    with pytest.raises(TypeError, match="shape: wanted integers"):
        full_shape((2.5, 2), 5)


def test_positions_are_inside() -> None:
    assert [bsr._position(i, 3) for i in (0, 2, -1, -3)] == [0, 2, 2, 0]
    for wrong in (3, -4):
        with pytest.raises(IndexError, match=f"index out of bounds: {wrong} of 3"):
            bsr._position(wrong, 3)


# ------------------------------------------------------------------------------------------------ construction
def test_a_class_of_one_device_is_not_asked_for_another() -> None:
    host_class = type(bg.bsr_array(np.eye(2), blocksize=(1, 1)))
    elsewhere = SimpleNamespace(name="elsewhere")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bsr, "by_name", lambda name: elsewhere)
        with pytest.raises(ValueError, match="device: wanted 'cpu' for host_bsr_array, got 'there'"):
            host_class.__init__(object.__new__(host_class), np.eye(2), device="there")


def test_a_sparse_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="BSR arrays don't support 1D input"):
        bg.bsr_array(scipy.sparse.coo_array(np.array([1.0, 0, 2])))


def test_blocks_of_another_size_than_was_asked_for_are_refused() -> None:
    data, row, col = np.ones((2, 2, 3)), np.array([0, 1]), np.array([0, 0])
    message = r"mismatching blocksize=\(1, 3\) vs \(2, 3\) of the blocks in data; leave blocksize out, and convert"
    for arrays in ((data, (row, col)), (data, col, [0, 1, 2])):
        with pytest.raises(ValueError, match=message):
            bg.bsr_array(arrays, blocksize=(1, 3))
        assert bg.bsr_array(arrays, blocksize=(2, 3)).shape == (4, 3)


def test_indices_of_elements_in_place_of_those_of_blocks_are_refused_with_the_reason() -> None:
    data, zero = np.ones((1, 2, 3)), np.array([0])
    for row, col, name in ((zero + 2, zero, "row"), (zero, zero + 3, "column")):
        with pytest.raises(ValueError, match=rf"\(shape=\(4, 6\)\); blocks of 2 x 3 are counted, not single {name}s$"):
            bg.bsr_array((data, (row, col)), shape=(4, 6))
        with pytest.raises(ValueError, match=r"\(shape=\(2, 3\)\)$"):
            bg.bsr_array((data.ravel()[:1], (row, col)), shape=(2, 3))


def test_a_shape_that_was_given_fits_the_indices_of_another_matrix() -> None:
    A = bg.bsr_array(np.eye(4), blocksize=(2, 2))
    assert bg.bsr_array(A, shape=(4, 6)).shape == (4, 6)
    with pytest.raises(ValueError, match="column index values must be < 1"):
        bg.bsr_array(A, shape=(4, 2))
    for given in (A, np.eye(4), scipy.sparse.csr_array(np.eye(4))):
        with pytest.raises(ValueError, match=r"^shape: wanted 4 rows, as arg1 has, got \(6, 4\)$"):
            bg.bsr_array(given, shape=(6, 4))


def test_indices_are_signed_and_have_32_bits_at_least() -> None:
    for given, want in (("u4", "i8"), ("i1", "i4"), ("i8", "i8"), ("i4", "i4"), ("u1", "i8")):
        assert _index_array(np.zeros(2, given), "row").dtype == np.dtype(want)
    assert _index_array(np.zeros(0), "row").dtype == np.int32
    with pytest.raises(ValueError, match="row: wanted integer indices, got dtype float64"):
        _index_array(np.zeros(2), "row")


def test_arrays_of_other_ranks_are_no_blocks() -> None:
    good = (np.ones((2, 1, 1)), np.array([0, 1]), np.array([0, 1, 2]))
    structure.check_arrays(*good, (2, 2))
    with pytest.raises(ValueError, match="data: BSR data must be 3-dimensional"):
        structure.check_arrays(good[0][0], good[1], good[2], (2, 2))
    with pytest.raises(ValueError, match="indices and indptr should be 1-D, got 2-D indices and 1-D indptr"):
        structure.check_arrays(good[0], good[1][None], good[2], (2, 2))
    with pytest.raises(ValueError, match="indices and indptr should be 1-D, got 1-D indices and 2-D indptr"):
        structure.check_arrays(good[0], good[1], good[2][None], (2, 2))


def test_index_arrays_of_two_dtypes_become_the_wider_one() -> None:
    blocks = Blocks(np.ones((2, 1, 1)), np.array([0, 1], np.int32), np.array([0, 1, 2], np.int64))
    found = HOST.validated(blocks, 2, 2)
    assert found.indices.dtype == found.indptr.dtype == np.int64
    short = Blocks(np.ones((3, 1, 1)), np.array([0, 1, 1]), np.array([0, 1, 2]))
    with pytest.raises(ValueError, match="indptr: last value 2 should be the number of blocks, 3"):
        HOST.validated(short, 2, 2)


def test_without_cupy_matrices_are_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def refuse(name: str, *args: Any, **how: Any) -> Any:
        if name == "cupy":
            raise OSError("a folder is missing")
        return imported(name, *args, **how)

    monkeypatch.setattr(registry, "_CUDA", None)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"needs CuPy, which cannot be imported \(a folder is missing\)"):
        registry.cuda()


# ------------------------------------------------------------------------------------------------ attributes
def test_a_matrix_without_arrays_says_which_one_it_lacks() -> None:
    A = bg.bsr_array(np.eye(2), blocksize=(1, 1))
    del A.__dict__["indices"]
    with pytest.raises(AttributeError, match="has no attribute 'indices'"):
        A.indices  # noqa: B018


def test_bytes_of_a_row_are_reinterpreted_as_whole_numbers() -> None:
    A = bg.bsr_array(np.ones((2, 3), np.float32), blocksize=(2, 3))
    with pytest.raises(ValueError, match="dtype: rows of a block have 12 bytes, no multiple of the size of float64"):
        A.dtype = np.float64
    A.dtype = np.int32
    assert A.dtype == np.int32 and A.data[0, 0, 0] == np.float32(1).view(np.int32)


def test_order_is_known_of_a_canonical_matrix_and_may_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    A = bg.bsr_array(np.eye(2), blocksize=(1, 1))
    assert A.has_canonical_format
    A._has_sorted_indices = None
    monkeypatch.setattr(structure, "is_sorted", None)  # nobody needs to look
    assert A.has_sorted_indices is True
    A.has_sorted_indices = 0
    assert A._has_sorted_indices is False
    B = duplicated()
    B.has_sorted_indices = False
    assert B.has_canonical_format is False and B._has_canonical_format is False


def test_formats_are_checked_by_name() -> None:
    A = bg.bsr_array(np.eye(2), blocksize=(1, 1))
    A.indptr[-1] = 3
    with pytest.raises(ValueError, match="indices array has too few elements: 2, wanted 3"):
        A.prune()
    B = bg.bsr_array(np.eye(2), blocksize=(1, 1))
    with pytest.raises(TypeError, match="indices: wanted integers, got float64"):
        B.indices = B.indices.astype(float)
    B.check_format(full_check=False)
    C = bg.bsr_array(np.eye(2), blocksize=(1, 1))
    C.indices[0] = 7
    C.check_format(full_check=False)
    with pytest.raises(ValueError, match="column index values must be < 2"):
        C.check_format()


def test_a_dtype_that_no_float_holds_is_not_upcast() -> None:
    A = bg.bsr_array(np.eye(2, dtype=np.longdouble), blocksize=(1, 1))
    with pytest.raises(TypeError, match="cannot upcast"):
        A._asfptype()
    assert bg.bsr_array(np.eye(2, dtype=np.int8), blocksize=(1, 1))._asfptype().dtype == np.float32


# ------------------------------------------------------------------------------------------------ stacks
def test_a_stack_of_sorted_formats_is_known_to_be_canonical() -> None:
    A = bg.bsr_array(np.eye(2), blocksize=(1, 1))
    found = bg.vstack([A, scipy.sparse.csr_array(np.eye(2))])
    assert found._known_canonical


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_a_kronecker_product_has_indices_of_one_dtype(index: Any) -> None:
    parts = (np.ones((2, 1, 1)), np.array([0, 1], index), np.array([0, 1, 2], index))
    A = bg.bsr_array(parts, shape=(2, 2))
    found = bg.kron(A, A)
    assert found.indices.dtype == found.indptr.dtype == index
    np.testing.assert_array_equal(found.toarray(), np.kron(A.toarray(), A.toarray()))


# ------------------------------------------------------------------------------------------------ dtypes
@pytest.mark.parametrize(
    "scalar, want",
    [
        (1, BFLOAT16), (1.5, BFLOAT16), (True, BFLOAT16), (1j, np.complex64),
        (np.float32(1), np.float32), (np.float64(1), np.float64), (np.int8(1), BFLOAT16), (np.int32(1), np.float64),
        (np.complex128(1), np.complex128), (np.float16(1), np.float32), (np.array(2.0), np.float64),
        (SimpleNamespace(dtype=np.dtype(np.float32)), np.float32), ([1.0, 2.0], np.float64),
    ],
    ids=str,
)  # fmt: skip
def test_a_number_times_bfloat16_has_the_dtype_of_its_class(scalar: Any, want: Any) -> None:
    assert scalar_result_dtype(np.dtype(BFLOAT16), scalar) == want


def test_a_number_takes_the_dtype_of_an_array_where_it_can() -> None:
    assert scalar_result_dtype(np.dtype(np.float32), 1.5) == np.float32
    assert scalar_result_dtype(np.dtype(np.float32), np.float64(1.5)) == np.float64
    assert scalar_result_dtype(np.dtype(np.int8), 1.5) == np.float64


# ------------------------------------------------------------------------------------------------ what is known
_WHOLE = np.arange(1, 25.0).reshape(4, 6)


def made() -> dict[str, Any]:
    """Results that are sorted and without duplicates by construction."""
    A = bg.bsr_array(_WHOLE, blocksize=(2, 3))
    A.has_canonical_format  # noqa: B018
    square = bg.bsr_array(np.eye(4) * 2 + 1, blocksize=(2, 2))
    csr = scipy.sparse.csr_array(_WHOLE)
    turned = A.T
    turned._build()
    changed = A.copy()
    late = changed.T
    changed.data = changed.data * 1  # the transpose is of what was there before
    late._source()
    matrix = bg.bsr_matrix(_WHOLE, blocksize=(2, 3))
    flat = bg.bsr_matrix(_WHOLE, blocksize=(2, 3))
    flat.shape = (2, 12)
    return {
        "sum": A + A,
        "product of elements": A.multiply(A),
        "columns of another format": A._coerce_columns(csr),
        "another format": A._coerce(csr),
        "full": A._from_full(_WHOLE, (2, 3)),
        "stack": bg.vstack([A, csr]),
        "stack of another dtype": bg.vstack([A, csr], dtype=np.float32),
        "stack of one format": bg.hstack([A, A]),
        "Kronecker product": bg.kron(A, A),
        "Kronecker product with an array": bg.kron(A, np.ones((2, 2))),
        "operand of a Kronecker product": assemble._canonical_in(A, csr, np.dtype("f4")),
        "function": abs(A),
        "transpose": turned,
        "transpose of what was there": late._source()[0],
        "transpose of a transpose": A.T.T,
        "transpose that is built": A._transpose_now(),
        "inverse": square.inverse_block_diagonal(),
        "other blocks": A.tobsr((1, 1)),
        "slice": A[2:, 3:],
        "copy": A.copy(),
        "column": matrix.getcol(2),
        "reshaped": flat,
        "from dense": bg.from_dense(_WHOLE, (2, 3)),
        "from another matrix": bg.bsr_array(A),
        "from another format": bg.bsr_array(csr, blocksize=(2, 3)),
    }


def test_what_is_known_of_a_result_need_not_be_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card, looking waits."""
    found = made()
    monkeypatch.setattr(structure, "is_sorted", None)
    monkeypatch.setattr(structure, "has_duplicates", None)
    for name, x in found.items():
        assert x._known_canonical, name
        assert x.has_sorted_indices and x.has_canonical_format, name


def test_nothing_is_known_of_a_matrix_with_duplicates() -> None:
    A = duplicated()
    for x in (A, A.T, A.copy(), bg.vstack([A, A]), A[:1]):
        assert not x._known_canonical
        assert not x.has_canonical_format


# ------------------------------------------------------------------------------------------------ sums
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16], ids=["float16", "bfloat16"])
def test_halves_are_added_in_single_precision(axis: int | None, dtype: Any) -> None:
    """The sum of the first block is not a number of this dtype."""
    values = np.array([2048, 1, -2048, 0] if dtype is np.float16 else [256, 1, -256, 0]).astype(dtype)
    A = bg.bsr_array(values.reshape((-1, 1) if axis == 0 else (1, -1)), blocksize=(2, 1) if axis == 0 else (1, 2))
    assert float(np.asarray(A.sum(axis=axis)).reshape(-1)[0]) == 1


def test_a_transpose_that_was_given_blocks_of_its_own_has_their_size() -> None:
    """Its other arrays are those of the transpose."""
    T = bg.bsr_array(_WHOLE, blocksize=(2, 3)).T
    T.data = np.zeros((4, 3, 2))
    assert T.blocksize == (3, 2) and T.shape == (6, 4)
    np.testing.assert_array_equal(T.toarray(), np.zeros((6, 4)))


def test_numbers_are_cast_before_a_sum_that_loses_their_fractions() -> None:
    """NumPy and CuPy cast at different times."""
    cast = reduce.Reductions._cast_for_sum
    assert cast(np.array([1.5, 1.5]), np.dtype(np.int64)).tolist() == [1, 1]
    kept = np.array([1.5, 1.5])
    assert cast(kept, np.dtype(np.float32)) is kept and cast(kept.astype(int), np.dtype(np.int8)).dtype == np.int64
    assert cast(np.array([1.5], BFLOAT16), np.dtype(np.float32)).dtype == np.float32
    assert cast(np.array([1.5 + 2j]), np.dtype(np.float64)).tolist() == [1.5]
