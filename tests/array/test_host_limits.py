"""Bounds, defaults and empty arguments of the array code, on the host and on a fake card."""

from __future__ import annotations

import io
import operator
import pickle
import zipfile
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp

import bsrgemm as bg
from bsrgemm import bsr
from bsrgemm._array import base, construct, convert, files, reduce
from bsrgemm._backend import loops

from .test_host_properties import LIMIT, each_device, index_dtypes, lower, numpy_of, on, put

pytestmark = pytest.mark.fake

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


# ------------------------------------------------------------------------------------------- files
def archived(compression: int = zipfile.ZIP_STORED, **arrays: Any) -> io.BytesIO:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, x in arrays.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, np.asanyarray(x))
    file.seek(0)
    return file


PARTS: dict[str, Any] = {
    "format": b"bsr",
    "shape": (2, 4),
    "data": np.arange(8.0).reshape(2, 2, 2),
    "indices": np.array([0, 1], np.int32),
    "indptr": np.array([0, 2], np.int32),
}
CSR: dict[str, Any] = {**PARTS, "format": b"csr", "data": np.arange(1.0, 3), "indptr": np.array([0, 1, 2], np.int32)}
COO: dict[str, Any] = {**CSR, "format": b"coo", "row": np.array([0, 1]), "col": np.array([3, 0])}
DIA: dict[str, Any] = {**PARTS, "format": b"dia", "data": np.ones((1, 4)), "offsets": np.array([1])}


def test_the_files_of_these_tests_are_valid() -> None:
    np.testing.assert_array_equal(bg.load_npz(archived(**PARTS)).toarray(), [[0, 1, 4, 5], [2, 3, 6, 7]])
    np.testing.assert_array_equal(bg.load_npz(archived(**CSR)).toarray(), [[1, 0, 0, 0], [0, 2, 0, 0]])
    np.testing.assert_array_equal(bg.load_npz(archived(**COO)).toarray(), [[0, 0, 0, 1], [2, 0, 0, 0]])
    np.testing.assert_array_equal(bg.load_npz(archived(**DIA)).toarray(), [[0, 1, 0, 0], [0, 0, 1, 0]])


@pytest.mark.parametrize(
    "parts, missing",
    [(PARTS, n) for n in PARTS] + [(CSR, "indices"), (COO, "row"), (COO, "col"), (DIA, "offsets")],
    ids=str,
)
def test_an_array_that_a_file_lacks_is_named(parts: dict[str, Any], missing: str) -> None:
    some = {name: x for name, x in parts.items() if name != missing}
    with pytest.raises(ValueError, match=f"^file: .* holds no valid matrix: it has no array '{missing}'"):
        bg.load_npz(archived(**some))


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (PARTS, {"data": np.arange(4.0).reshape(2, 2)}, "3-dimensional"),
    (PARTS, {"data": np.ones((1, 2, 2))}, "same size"),
    (PARTS, {"data": np.ones((2, 2, 3))}, "blocksize|divide"),
    (PARTS, {"indptr": np.array([0, 1, 2])}, "indptr"),
    (PARTS, {"indptr": np.array([0, 3])}, "indptr: last value 3"),
    (PARTS, {"indptr": np.array([1, 2])}, "indptr: index pointer should start with 0, got 1"),
    (PARTS, {"indices": np.array([0, 2])}, "column index values must be < 2"),
    (PARTS, {"indices": np.array([-1, 1])}, "column index values must be >= 0"),
    (PARTS, {"indices": np.array([[0, 1]])}, "indices: wanted integers in one dimension, got int64 in 2"),
    (PARTS, {"indptr": np.zeros(0, int)}, "indptr"),
    (PARTS, {"shape": (2, -4)}, "shape"),
    (PARTS, {"shape": (2, 4, 1)}, "shape"),
    (PARTS, {"format": b"lil"}, "wanted the format bsr, csr, csc, coo or dia, got 'lil'"),
    (CSR, {"data": np.ones((2, 1))}, "do not make a matrix of shape"),
    (CSR, {"data": np.ones(3)}, "do not make a matrix of shape"),
    (CSR, {"indptr": np.array([0, 2])}, "do not make a matrix of shape"),
    (CSR, {"indptr": np.array([0, 2**63 - 1, -2], np.int64), "shape": (2, 4)}, "non-decreasing"),
    (CSR, {"indptr": np.array([0, 1, 3])}, "indptr: last value 3"),
    (CSR, {"indices": np.array([0, 4])}, "column index values must be < 4"),
    (CSR, {"indices": np.array([0, 2**63], np.uint64)}, "indices: 9223372036854775808 does not fit"),
    ({**CSR, "format": b"csc", "shape": (4, 2)}, {"indices": np.array([0, 4])}, "column index values must be < 4"),
    (COO, {"row": np.array([0, 2])}, "index 2 exceeds matrix dimension 2"),
    (COO, {"col": np.array([0.0, 1])}, "col: wanted integers"),
    (DIA, {"offsets": np.array([1, 1])}, ""),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_file_with_wrong_arrays_holds_no_valid_matrix(number: int) -> None:
    parts, wrong, message = WRONG[number]
    with pytest.raises(ValueError, match=f"^file: .* holds no valid matrix: .*({message})"):
        bg.load_npz(archived(**{**parts, **wrong}))


@pytest.mark.parametrize("blocks", [1, 2, 300, 20_000])
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_byte_that_was_changed_is_noticed(compression: int, blocks: int) -> None:
    data = np.random.default_rng(0).random((blocks, 1, 1))
    parts = {**PARTS, "shape": (1, blocks), "indices": np.arange(blocks), "indptr": np.array([0, blocks])}
    content = archived(compression, **{**parts, "data": data}).getvalue()
    assert bg.load_npz(io.BytesIO(content)).nnz == blocks
    if compression == zipfile.ZIP_STORED:
        first = content.index(data.tobytes())
        places = [first, first + data.nbytes // 2, first + data.nbytes - 1]
    else:
        first = content.index(b"data.npy")
        places = [(first + content.index(b"PK", first)) // 2]
    for at in places:
        wrong = bytearray(content)
        wrong[at] ^= 1
        with pytest.raises(ValueError, match=r"^file: "):
            bg.load_npz(io.BytesIO(bytes(wrong)))


def test_zeros_are_compressed_by_no_more_than_the_format_can() -> None:
    assert files._MOST_COMPRESSED == 258 * 8 // 2  # at best two bits stand for 258 bytes
    file = archived(zipfile.ZIP_DEFLATED, **{**PARTS, "shape": (1, 4 * 10**5), "data": np.zeros((2, 1, 2 * 10**5)),
                                             "indptr": np.array([0, 2])})  # fmt: skip
    assert bg.load_npz(file).count_nonzero() == 0


# ------------------------------------------------------------------------------------------ printing
@each_device
def test_elements_are_printed_where_they_are(device: str) -> None:
    A = bg.bsr_array((np.arange(1.0, 19).reshape(3, 2, 3), [2, 0, 1], [0, 0, 1, 3]), shape=(6, 9), maxprint=7)
    where = [(2 * r + i, 3 * c + j) for r, c in ((1, 2), (2, 0), (2, 1)) for i in range(2) for j in range(3)]
    lines = [f"  {place}\t{float(n)}" for n, place in enumerate(where, 1)]
    assert str(on(A, device)).splitlines()[3:] == [*lines[:3], "  :\t:", *lines[-4:]]
    A.maxprint = 18
    assert str(on(A, device)).splitlines()[3:] == lines
    A.maxprint = 17
    assert str(on(A, device)).splitlines()[3:] == [*lines[:8], "  :\t:", *lines[-9:]]
    A.maxprint = 12
    assert str(on(A, device)).splitlines()[3:] == [*lines[:6], "  :\t:", *lines[-6:]]


# ------------------------------------------------------------------------------------- empty arguments
@each_device
def test_no_blocks_are_added_and_blocks_are_added_to_none(device: str) -> None:
    empty = on(bg.bsr_array((4, 6), blocksize=(2, 3)), device)
    blocks = put(device, np.ones((1, 2, 3)))
    assert empty.assemble(blocks, [0], [0], check=False).nnz == 0
    with pytest.raises(ValueError, match=r"entry 0 is block \(1, 0\), which is not stored"):
        empty.assemble(blocks, [1], [0], check=True)
    full = on(bg.bsr_array(np.ones((4, 6)), blocksize=(2, 3)), device)
    for A in (empty, full):
        for check in (None, True, False):
            A.assemble(put(device, np.ones((0, 2, 3))), [], [], check=check)
    np.testing.assert_array_equal(numpy_of(full), np.ones((4, 6)))


@each_device
def test_a_diagonal_of_no_values_changes_nothing(device: str) -> None:
    A = on(bg.bsr_array((np.ones((2, 1, 1)), [1, 0], [0, 2, 2]), shape=(2, 2)), device)
    before = A._blocks
    A.setdiag([])
    A.setdiag(put(device, np.zeros(0)), k=1)
    assert all(x is y for x, y in zip(A._blocks, before, strict=True))
    for shape in ((0, 0), (2, 0), (0, 2)):
        empty = on(bg.bsr_array(shape), device)
        empty.setdiag(1.0)
        assert empty.nnz == 0 and empty.diagonal().shape == (0,)
        for k in (-3, 3):
            with pytest.raises(ValueError, match=f"k exceeds array dimensions: k={k} of shape"):
                empty.setdiag(1.0, k=k)


@each_device
@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
def test_diagonals_end_at_the_corners(shape: tuple[int, int], device: str) -> None:
    dense = np.arange(1.0, 25).reshape(shape)
    for block in ((2, 2), (2, 1), (1, 2)):
        A = on(bg.bsr_array(dense, blocksize=block), device)
        for k in range(-shape[0] - 1, shape[1] + 2):
            inside = -shape[0] < k < shape[1]
            np.testing.assert_array_equal(numpy_of(A.diagonal(k)), dense.diagonal(k) if inside else [])
            assert float(numpy_of(A.trace(k))) == (dense.trace(k) if inside else 0)
            B = A.copy()
            if not inside:
                with pytest.raises(ValueError, match="k exceeds array dimensions"):
                    B.setdiag(0.0, k=k)
                continue
            B.setdiag(put(device, np.full(9, -1.0)), k=k)
            want = dense.copy()
            rows = np.arange(len(dense.diagonal(k))) - min(k, 0)
            want[rows, rows + k] = -1
            np.testing.assert_array_equal(numpy_of(B), want)


# ------------------------------------------------------------------------------------- arrays of scipy
def test_wrong_arrays_of_a_matrix_of_scipy_are_refused() -> None:
    def wrong(format: str, name: str, value: Any) -> Any:
        S = sp.bsr_array(np.ones((4, 6)), blocksize=(2, 3)).asformat(format)
        S.has_canonical_format  # noqa: B018 (scipy looks before the array is changed)
        setattr(S, name, value)
        return S

    for S, message in (
        (wrong("bsr", "indices", np.array([0, 1, 0, 2], np.int32)), "column index values must be < 2"),
        (wrong("bsr", "indptr", np.array([0, 2, 5], np.int32)), "indptr: last value 5"),
        (wrong("bsr", "indptr", np.array([0, 4], np.int32)), "indptr|index pointer"),
        (wrong("bsr", "data", np.ones((3, 2, 3))), "same size"),
        (wrong("csr", "indices", np.full(24, 6, np.int32)), "column index values must be < 6"),
        (wrong("coo", "coords", (np.full(24, 4), np.zeros(24, int))), "row index 4 exceeds matrix dimension 4"),
    ):
        with pytest.raises(ValueError, match=message):
            bg.bsr_array(S)


@each_device
def test_another_shape_than_that_of_the_argument_is_checked(device: str) -> None:
    S = sp.csr_array(np.ones((4, 6)))
    A = bg.bsr_array(S, blocksize=(2, 3), device=device)
    for source in (S, A):
        wide = bg.bsr_array(source, shape=(4, 9), blocksize=(2, 3), device=device)
        assert wide.shape == (4, 9) and numpy_of(wide)[:, 6:].max() == 0
        with pytest.raises(ValueError, match="column index values must be < 1"):
            bg.bsr_array(source, shape=(4, 3), blocksize=(2, 3), device=device)
        with pytest.raises(ValueError, match=r"shape: wanted 4 rows, as arg1 has, got \(6, 6\)|index pointer"):
            bg.bsr_array(source, shape=(6, 6), blocksize=(2, 3), device=device)
        with pytest.raises(ValueError, match=r"divi|multiple"):
            bg.bsr_array(source, shape=(4, 7), blocksize=(2, 3), device=device)


# ---------------------------------------------------------------------------------- defaults and bounds
def test_defaults_of_matrices_by_a_rule() -> None:
    A = bg.random(100, 100, blocksize=(1, 1))
    assert A.nnz == 100 and A.dtype == np.float64
    assert bg.random(4, 4, blocksize=(2, 2), density=1).nnz == 16
    assert bg.eye(3).dtype == np.float64 and bg.eye(3).blocksize == (1, 1)
    for density in (-0.01, 1.01, np.nan):
        with pytest.raises(ValueError, match="density: wanted a number from 0 to 1"):
            bg.random(4, 4, blocksize=(2, 2), density=density)


@pytest.mark.parametrize("dtype, bits", [(np.float16, 11), (BFLOAT16, 8)])
def test_random_halves_have_all_the_bits_that_are_exact(dtype: Any, bits: int) -> None:
    steps = bg.random(64, 64, blocksize=(64, 64), density=1, seed=3, dtype=dtype).data.astype(float) * 2**bits
    assert (steps == np.floor(steps)).all() and (steps % 2 == 1).any()
    assert steps.min() >= 0 and 0.99 * 2**bits < steps.max() + 1 <= 2**bits


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, bool])
def test_random_integers_take_every_value(dtype: Any) -> None:
    data = bg.random(128, 128, blocksize=(128, 128), density=1, seed=3, dtype=dtype).data
    assert len(np.unique(data)) == (2 if dtype is bool else 256)


@each_device
@pytest.mark.parametrize("axis", [-3, 2, (0, 2), (-3, 0)])
def test_an_axis_beyond_the_two_is_refused(axis: Any, device: str) -> None:
    A = on(bg.eye(2), device)
    for call in (A.sum, A.mean, A.max, A.argmin, A.count_nonzero, lambda axis: bg.norm(A, axis=axis)):
        with pytest.raises(ValueError, match="axis"):
            call(axis=axis)


@each_device
def test_the_axes_of_a_wide_matrix_are_told_apart(device: str) -> None:
    dense = np.array([[1.0, -2, 0, 4], [0, 3, -5, 0]])
    A = on(bg.bsr_array(dense, blocksize=(1, 2)), device)
    for negative, axis in ((-2, 0), (-1, 1), ((0,), 0), ((-1,), 1)):
        np.testing.assert_array_equal(numpy_of(A.sum(axis=negative)), dense.sum(axis=axis))
        np.testing.assert_array_equal(numpy_of(bg.norm(A, 1, axis=negative)), abs(dense).sum(axis=axis))
    for both in ((0, 1), (-2, -1), (1, 0)):
        assert float(numpy_of(A.sum(axis=both))) == dense.sum()
    for ord in (2, -2, 2.0):
        with pytest.raises(NotImplementedError, match="singular values"):
            bg.norm(A, ord)
    for ord in (0, 3, "nuc", -3, np.nan, "inf"):
        with pytest.raises(ValueError, match="ord: wanted None, 'fro', 1, -1, inf or -inf"):
            bg.norm(A, ord)
    for ord in (-1, -0.5, "fro", np.nan):
        with pytest.raises(ValueError, match="ord: wanted None, 0, a number > 0, inf or -inf"):
            bg.norm(A, ord, axis=0)
    assert float(numpy_of(bg.norm(A, "f"))) == float(numpy_of(bg.norm(A, "fro"))) == np.sqrt((dense**2).sum())
    assert float(numpy_of(bg.norm(A, 1, axis=(1, 0)))) == float(numpy_of(bg.norm(A.T, 1)))


@pytest.mark.parametrize("divisor", [2.0**-140, -(2.0**-126), 2.0**126, 2.0**140, 2.0**-64, 2.0**64, 2.0**-65, -1, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_quotients_by_extreme_powers_of_two_are_those_of_numpy(divisor: float, dtype: Any) -> None:
    data = np.array([[2.0**-149, 2.0**-130, 1.0, 2.0**100, -3.0, 0.0]]).astype(dtype)
    A = bg.bsr_array(data, blocksize=(1, 2))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal((A / divisor).toarray(), data / divisor)


@each_device
def test_formats_that_a_device_lacks_are_refused_by_name(device: str) -> None:
    A = on(bg.bsr_array(np.eye(2), blocksize=(1, 1)), device)
    for name in ("tolil", "todok"):
        if device == "cpu":
            np.testing.assert_array_equal(getattr(A, name)().toarray(), np.eye(2))
        else:
            with pytest.raises(NotImplementedError, match=f"{name}: .* has no {name[2:]}_array; copy to the host"):
                getattr(A, name)()


def test_dense_arrays_of_objects_are_no_matrices() -> None:
    for X in (np.array([[1, 2]], object), [["a", "b"]], np.array([[1, 2]], "M8[s]")):
        with pytest.raises(TypeError):
            bg.from_dense(X, (1, 1))
    with pytest.raises(TypeError, match="dtype"):
        bg.from_dense(np.array([[1, 2]], object), (1, 1))
    assert bg.from_dense([[0, 3]], (1, 1)).nnz == 1


@each_device
def test_wide_integers_are_compared_exactly(device: str) -> None:
    """Their common dtype is float64, in which these two are the same."""
    big = 2**62
    A = on(bg.bsr_array(np.array([[big + 1, 3]]), blocksize=(1, 1)), device)
    other = put(device, np.array([[big, 3]], np.uint64))
    np.testing.assert_array_equal(numpy_of(operator.eq(A, other)), [[False, True]])
    np.testing.assert_array_equal(numpy_of(operator.gt(A, other)), [[True, False]])


# ------------------------------------------------------------------------------------ at the very limits
def test_blocks_that_are_filled_to_the_limit_are_not_filled_well() -> None:
    def best(elements: int, **counts: int) -> int:
        return construct._best_side((12, 12), elements, lambda side: counts[f"of_{side}"])[0]

    few = 10**6
    assert best(28, of_2=10, of_3=few, of_4=few, of_6=few) == 1  # 70 %
    assert best(29, of_2=10, of_3=few, of_4=few, of_6=few) == 2
    assert best(34 * 9, of_2=90, of_3=36, of_4=few, of_6=9) == 3  # 85 % in blocks of side 2
    assert best(252, of_2=63, of_3=28, of_4=few, of_6=10) == 3  # 70 % in blocks of side 6
    assert best(253, of_2=64, of_3=29, of_4=few, of_6=10) == 6


@each_device
def test_blocks_are_counted_for_the_width_of_indices_and_not_elements(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower(monkeypatch)
    side = LIMIT // 2
    for block in ((side, 1), (1, side), (side, side)):
        shape = (block[0] * 3, block[1] * 3)
        assert index_dtypes(bg.bsr_array(shape, blocksize=block, device=device)) == {np.dtype(np.int32)}
        places = np.array([0, 1], np.int32), np.array([2, 0], np.int32)
        A = bg.bsr_array((np.ones((2, *block)), places), shape=shape, device=device)
        assert index_dtypes(A) == {np.dtype(np.int32)}


def test_index_arrays_of_32_bits_are_shared() -> None:
    parts = np.ones((2, 1, 1)), np.array([0, 1], np.int32), np.array([0, 1, 2], np.int32)
    for cls in (bg.bsr_array, bg.bsr_matrix):
        A = cls(parts, shape=(2, 2))
        assert all(np.shares_memory(x, y) for x, y in zip(A._blocks, parts, strict=True))


@each_device
def test_a_diagonal_that_just_misses_the_matrix_is_refused(device: str) -> None:
    for offset in (-2, 2, 3):
        with pytest.raises(ValueError, match=rf"offsets\[0\]: diagonal {offset} is outside a matrix of 2 x 2 blocks"):
            bg.diags([1.0], [offset], shape=(2, 2), device=device)
    assert bg.diags([1.0], [1], shape=(2, 2), device=device).nnz == 1


@each_device
def test_the_smallest_element_of_a_line_is_zero_unless_all_are_stored(device: str) -> None:
    dense = np.kron(np.array([[1.0, 2, 3], [0, 4, 5]]), np.ones((2, 3))) + np.zeros((4, 9))
    A = on(bg.bsr_array(dense, blocksize=(2, 3)), device)
    for axis in (0, 1):
        np.testing.assert_array_equal(numpy_of(bg.norm(A, -np.inf, axis=axis)), dense.min(axis=axis))
        np.testing.assert_array_equal(numpy_of(bg.norm(A, np.inf, axis=axis)), dense.max(axis=axis))
        np.testing.assert_array_equal(numpy_of(A.min(axis=axis)), dense.min(axis=axis))
    empty = on(bg.bsr_array((4, 9), blocksize=(2, 3)), device)
    np.testing.assert_array_equal(numpy_of(bg.norm(empty, -np.inf, axis=1)), np.zeros(4))


def test_shapes_without_elements_are_completed() -> None:
    assert convert.full_shape((0, 3), 0) == (0, 3) and convert.full_shape((-1, 3), 0) == (0, 3)
    assert convert.full_shape((-1,), 6) == (6,) and convert.full_shape((2, -1, 3), 12) == (2, 2, 3)
    for shape, size in (((0, -1), 0), ((0, -1), 6), ((-1, 4), 6), ((), 1), ((5,), 6), ((2**40, 2**40), 0)):
        with pytest.raises(ValueError, match="cannot reshape array of size"):
            convert.full_shape(shape, size)
    with pytest.raises(ValueError, match="can only specify one unknown dimension"):
        convert.full_shape((-1, -1), 6)
    with pytest.raises(TypeError, match="shape: wanted integers"):
        convert.full_shape((2.0, 3), 6)


def test_too_many_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="tuple has too many elements"):
        bg.eye(2).sum(axis=(None, 0, 1))


@pytest.mark.parametrize("dtype, wider", [(np.float16, "float32"), (BFLOAT16, "float32"), (np.int64, "float64")])
def test_an_error_of_another_format_names_a_dtype_that_it_has(dtype: Any, wider: str) -> None:
    device = "cpu" if np.dtype(dtype).itemsize == 2 else "cuda"
    A = on(bg.bsr_array(np.ones((1, 2), dtype), blocksize=(1, 1)), device)
    with pytest.raises(TypeError, match=rf"csr: .* does not hold .*A\.astype\('{wider}'\)") as caught:
        A.tocsr()
    assert ("copy to the host" in str(caught.value)) == (device == "cuda")


# ------------------------------------------------------------------------------- blocks outside of the matrix
OUTSIDE = ([-1, 0, 2, 0, 3, -2, 1, 5], [0, -1, 0, 3, 1, 2, 4, 5])


@each_device
def test_blocks_outside_of_the_matrix_are_not_added(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of their numbers, counted row by row, are those of other blocks that are stored."""
    dense = np.arange(1.0, 7).reshape(2, 3)
    A = on(bg.bsr_array(dense, blocksize=(1, 1)), device)
    small = on(bg.bsr_array(np.ones((1, 1)), blocksize=(1, 1)), device)
    positions = loops.HostLoops.positions

    def checked(self: Any, blocks: Any, block_cols: int, row: Any, col: Any) -> Any:
        assert (row >= 0).all() and (row < len(blocks.indptr) - 1).all()
        assert (col >= 0).all() and (col < block_cols).all()
        return positions(self, blocks, block_cols, row, col)

    monkeypatch.setattr(loops.HostLoops, "positions", checked)
    values = put(device, np.full((8, 1, 1), 100.0))
    A.assemble(values, *OUTSIDE, check=False)
    np.testing.assert_array_equal(numpy_of(A), dense)
    small.assemble(values, *OUTSIDE, check=False)
    assert numpy_of(small) == 1
    with pytest.raises(ValueError, match=r"entry 0 is block \(-1, 0\), which is not stored"):
        A.assemble(values, *OUTSIDE, check=True)
    row, col = [1, *OUTSIDE[0]], [2, *OUTSIDE[1]]
    values = put(device, np.full((9, 1, 1), 100.0))
    with pytest.raises(ValueError, match=r"entry 1 is block \(-1, 0\), which is not stored"):
        A.assemble(values, row, col, check=True)
    A.assemble(values, row, col, check=False)
    dense[1, 2] += 100
    np.testing.assert_array_equal(numpy_of(A), dense)


def test_nothing_is_written_behind_the_blocks() -> None:
    memory = np.zeros((4, 1, 1))
    A = bg.bsr_array((memory[:3], [0, 1, 2], [0, 3]), shape=(1, 4))
    assert np.shares_memory(A.data, memory)
    A.assemble(np.ones((3, 1, 1)), [0, 0, 0], [3, 2, 3], check=False)
    assert memory.reshape(-1).tolist() == [0, 0, 1, 0]


@each_device
def test_a_number_on_the_device_is_a_number(device: str) -> None:
    A = on(bg.bsr_array(np.array([[-3.0, 2, 0, 0]]), blocksize=(1, 2)), device)
    for name, kept, lost, sign in (("maximum", -1.0, 1.0, "positive"), ("minimum", 1.0, -1.0, "negative")):
        function = getattr(np, name)
        found = getattr(A, name)(put(device, np.array(kept)))
        assert found.format == "csr"
        np.testing.assert_array_equal(numpy_of(found), function([[-3.0, 2, 0, 0]], kept))
        for number in (lost, put(device, np.array(lost))):
            with pytest.warns(sp.SparseEfficiencyWarning, match=f"Taking {name} with a {sign} number results in a"):
                found = getattr(A, name)(number)
            assert found.format == "bsr" and found.blocksize == (1, 1)
            np.testing.assert_array_equal(numpy_of(found), function([[-3.0, 2, 0, 0]], lost))


# --------------------------------------------------------------------------------------- places of extremes
@each_device
@pytest.mark.parametrize("block", [(1, 1), (2, 3), (1, 14)], ids=str)
def test_places_of_extremes_are_those_of_the_dense_array(block: tuple[int, int], device: str) -> None:
    """Lines that are full and lines with holes, with stored zeros before and after the first hole."""
    rng = np.random.default_rng(0)
    for low, high, share in (
        (-2, 1, 1.0),
        (-2, 1, 0.6),
        (0, 3, 1.0),
        (0, 3, 0.6),
        (-2, 0, 0.8),
        (1, 3, 0.8),
        (-1, 2, 0),
    ):
        row, col = np.nonzero(rng.random((3, 4)) < share)
        data = rng.integers(low, high, (len(row), *block)).astype(float)
        A = on(bg.bsr_array((data, (row, col)), shape=(3 * block[0], 4 * block[1])), device)
        dense = numpy_of(A)
        for axis in (None, 0, 1):
            for name in ("argmax", "argmin"):
                found = getattr(A, name)(axis=axis)
                np.testing.assert_array_equal(numpy_of(found), getattr(np, name)(dense, axis=axis))
            for name in ("max", "min"):
                found = getattr(A, name)(axis=axis)
                np.testing.assert_array_equal(numpy_of(found), getattr(np, name)(dense, axis=axis))
        if data.size:
            assert A.max(explicit=True) == data.max() and A.min(explicit=True) == data.min()


@each_device
def test_a_resize_that_keeps_all_blocks_keeps_their_arrays(device: str) -> None:
    A = on(bg.bsr_array(np.ones((4, 6)), blocksize=(2, 3)), device)
    data, indices, indptr = A.data, A.indices, A.indptr
    for shape in ((4, 6), (4, 9)):
        A.resize(shape)
        assert A.data is data and A.indices is indices and A.indptr is indptr and A.shape == shape
    A.resize(6, 9)
    assert A.data is data and A.indices is indices and numpy_of(A.indptr).tolist() == [0, 2, 4, 4]
    A.resize(6, 3)
    np.testing.assert_array_equal(numpy_of(A), np.repeat([[1.0], [0.0]], [4, 2], axis=0).repeat(3, axis=1))
    A.resize(2, 3)
    assert len(A.data) == len(A.indices) == 1 and numpy_of(A.indptr).tolist() == [0, 1]


@each_device
def test_results_have_index_arrays_of_their_own(device: str) -> None:
    A = on(bg.bsr_array(np.ones((4, 6)), blocksize=(2, 3)), device)
    for B in (-A, abs(A), A * 2, A / 3, A.real, A.imag, A.astype(np.float32), A.power(2), A.sin(), A.copy(), round(A)):
        for name in ("data", "indices", "indptr"):
            assert not A._backend.xp.may_share_memory(getattr(A, name), getattr(B, name)), name


def test_the_bytes_of_a_block_row_are_read_as_another_dtype() -> None:
    A = bg.bsr_array(np.ones((2, 6), np.float32), blocksize=(2, 3))
    with pytest.raises(ValueError, match="rows of a block have 12 bytes, no multiple of the size of float64"):
        A.dtype = np.float64
    A.dtype = np.int32
    assert A.dtype == np.int32 and A.blocksize == (2, 3)
    B = bg.bsr_array(np.ones((3, 8), np.float32), blocksize=(3, 4))
    B.dtype = np.float64
    assert B.data.shape == (2, 3, 2)


def test_sums_of_the_matrix_class_are_written_to_matrices() -> None:
    A = bg.bsr_matrix(np.arange(6.0).reshape(2, 3), blocksize=(1, 3))
    for call, want in ((A.sum, 15.0), (A.mean, 2.5)):
        out = np.zeros((1, 1))
        assert call(out=out) is out and out[0, 0] == want
        for shape in ((), (1,), (1, 2), (2, 1)):
            with pytest.raises(ValueError, match="output parameter has wrong dimensions"):
                call(out=np.zeros(shape))
    assert bg.bsr_array(A).sum(out=np.zeros(())) == 15


@each_device
def test_norms_of_every_positive_order_are_those_of_numpy(device: str) -> None:
    dense = np.array([[1.0, -2, 0, 4], [0, 3, -5, 0]])
    A = on(bg.bsr_array(dense, blocksize=(1, 2)), device)
    for p in (0.5, 1, 1.5, 2, 3):
        for axis in (0, 1):
            want = np.linalg.norm(dense, p, axis=axis)
            np.testing.assert_allclose(numpy_of(bg.norm(A, p, axis=axis)), want, rtol=1e-14)


def test_a_diagonal_outside_of_a_narrow_matrix_is_refused() -> None:
    for shape, k in (((1, 1), 1), ((1, 1), -1), ((2, 1), 1), ((1, 2), -1), ((0, 1), 1), ((1, 0), -1)):
        with pytest.raises(ValueError, match="k exceeds array dimensions"):
            bg.bsr_array(shape).setdiag(1.0, k=k)


def test_the_largest_index_of_a_file_has_63_bits() -> None:
    assert files._indices(np.array([2**63 - 1], np.uint64), "row")[0] == 2**63 - 1


@each_device
def test_a_zero_that_is_not_stored_comes_before_one_that_is(device: str) -> None:
    for sign in (1.0, -1.0):
        A = on(bg.bsr_array((sign * np.array([-1.0, 0]).reshape(-1, 1, 1), [1, 2], [0, 2]), shape=(1, 3)), device)
        B = on(bg.bsr_array((sign * np.array([0, -1.0]).reshape(-1, 1, 1), [0, 1], [0, 2]), shape=(1, 3)), device)
        for matrix in (A, B):
            assert (matrix.argmax() if sign > 0 else matrix.argmin()) == 0
            assert numpy_of(matrix.argmax(axis=1) if sign > 0 else matrix.argmin(axis=1)).tolist() == [0]


@pytest.mark.parametrize("number", [24, -1, np.int64(24), np.int8(-1)])
def test_a_single_number_is_a_shape_of_one_dimension(number: Any) -> None:
    dense = np.arange(24.0).reshape(4, 6)
    A = bg.bsr_array(dense, blocksize=(2, 3))
    for found in (A.reshape(number), A.reshape((number,)), A.reshape([number])):
        assert found.shape == (24,)
        np.testing.assert_array_equal(found.toarray(), dense.reshape(-1))
    for order in ("C", "F"):
        for shape in ((2, 12), (2, 3, 4), (24, 1), (1, 2, 12, 1)):
            found = A.reshape(*shape, order=order)
            np.testing.assert_array_equal(found.toarray(), dense.reshape(shape, order=order))
    with pytest.raises(ValueError, match="matrix must have 2 dimensions"):
        bg.bsr_matrix(A).reshape(number)


def test_a_number_beyond_a_single_block_is_out_of_range() -> None:
    """Numbers on the device are known to be wrong only after they were used."""
    for device in ("cpu", "cuda"):
        A = on(bg.bsr_array(np.ones((2, 3)), blocksize=(2, 3)), device)
        for wrong in (1, -2, 7):
            index = put(device, np.array([wrong]))
            with pytest.raises(IndexError, match=f"rows: block row {wrong} is out of range for 1 block rows"):
                A.select_blocks(rows=index)
            with pytest.raises(IndexError, match=f"cols: block column {wrong} is out of range for 1 block columns"):
                A.select_blocks(cols=index)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_of_pickle_keeps_a_matrix(protocol: int) -> None:
    for device in ("cpu", "cuda"):
        A = on(bg.bsr_array(np.arange(24.0).reshape(4, 6), blocksize=(2, 3), maxprint=7), device)
        for matrix in (A, A.T):
            B = pickle.loads(pickle.dumps(matrix, protocol))
            assert type(B) is type(A) and B.shape == matrix.shape and set(vars(B)) <= base._STATE | {"_canonical_since"}
            np.testing.assert_array_equal(numpy_of(B), numpy_of(matrix))


def test_a_stream_of_another_library_has_version_0_of_the_protocol() -> None:
    assert bsr._ExternalStream(1234).__cuda_stream__() == (0, 1234)


class CheckedNumPy:
    """NumPy, but elements that are not zero are counted by it only in arrays of its own and dtypes that it knows."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def count_nonzero(self, x: Any) -> Any:
        assert type(x) is np.ndarray and x.dtype != BFLOAT16
        return np.count_nonzero(x)


@each_device
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.float16, bool])
def test_nonzeros_of_a_device_are_counted_there(device: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    A = on(bg.bsr_array(np.array([[0, 1, 0, 1], [1, 1, 0, 0]], dtype), blocksize=(1, 2)), device)
    monkeypatch.setattr(reduce, "np", CheckedNumPy())
    assert A.count_nonzero() == 4


def test_a_sum_with_a_dense_array_is_stored_by_rows() -> None:
    A = bg.bsr_array(np.ones((4, 6)), blocksize=(2, 3))
    for dense in (
        np.ones((4, 6)),
        np.asfortranarray(np.ones((4, 6))),
        np.ones((6, 4)).T,
        np.ones(6),
        np.ones((8, 6))[::2],
    ):
        found = A + dense
        assert found.flags.c_contiguous and (found == 2).all()
