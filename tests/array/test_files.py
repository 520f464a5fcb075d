"""Matrices in files: every dtype comes back, files of scipy are read, and no file can make an invalid matrix."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

import bsrgemm as bg
from bsrgemm._backend.base import Backend
from bsrgemm.dtypes import BFLOAT16, HALF_DTYPES, HOST_DTYPES

each_dtype = pytest.mark.parametrize("dtype", HOST_DTYPES, ids=str)
each_kind = pytest.mark.parametrize("kind", [bg.bsr_array, bg.bsr_matrix])


def matrix(dtype: Any = np.float64, kind: Any = bg.bsr_array, index: Any = np.int32) -> Any:
    """Blocks of 2 x 3, unsorted and with a duplicate, in every bit pattern that is quick to make."""
    rng = np.random.default_rng(1)
    dtype = np.dtype(dtype)
    if dtype in HALF_DTYPES:  # every kind of number: subnormals, infinities, NaN with payloads
        data = rng.integers(0, 2**16, (5, 2, 3), np.uint16).view(dtype)
    else:
        data = rng.integers(0, 100, (5, 2, 3)).astype(dtype)
    return kind((data, np.array([3, 0, 0, 1, 1], index), np.array([0, 3, 3, 5], index)), shape=(6, 12))


def bits(x: Any) -> bytes:
    return np.ascontiguousarray(x).tobytes()


def saved(A: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    bg.save_npz(file, A, **options)
    file.seek(0)
    return file


def archive(**arrays: Any) -> io.BytesIO:
    file = io.BytesIO()
    np.savez(file, **arrays)
    file.seek(0)
    return file


@pytest.mark.parametrize("compressed", [True, False])
@each_kind
@each_dtype
def test_a_matrix_comes_back_with_the_same_bits(dtype: Any, kind: Any, compressed: bool) -> None:
    A = matrix(dtype, kind)
    B = bg.load_npz(saved(A, compressed=compressed))
    assert type(B) is type(A) and B.shape == A.shape and B.dtype == A.dtype and B.indices.dtype == A.indices.dtype
    assert [bits(x) for x in B._blocks] == [bits(x) for x in A._blocks]
    B.data[0, 0, 0] = B.data[0, 0, 1]  # its arrays can be written to


@pytest.mark.parametrize("dtype", [np.float64, np.float16, BFLOAT16], ids=str)
@each_kind
def test_a_matrix_of_a_device_is_saved_through_the_host(backend: Backend, dtype: Any, kind: Any) -> None:
    A = matrix(dtype, kind).to_device(backend.name)
    file = saved(A)
    B = bg.load_npz(file)
    assert B.device == "cpu" and isinstance(B, kind)
    file.seek(0)
    C = bg.load_npz(file, device=backend.name)
    assert type(C) is type(A)
    for ours in (B._blocks, [backend.to_host(x) for x in C._blocks]):
        assert [bits(x) for x in ours] == [bits(backend.to_host(x)) for x in A._blocks]


def test_a_transpose_that_is_not_built_is_saved(backend: Backend) -> None:
    A = matrix().to_device(backend.name)
    np.testing.assert_array_equal(bg.load_npz(saved(A.T)).toarray(), matrix().toarray().T)


def test_empty_matrices_and_wide_indices_are_kept() -> None:
    A = bg.load_npz(saved(bg.bsr_array((0, 6), blocksize=(2, 3), dtype=BFLOAT16)))
    assert A.shape == (0, 6) and A.blocksize == (2, 3) and A.dtype == BFLOAT16
    assert bg.load_npz(saved(matrix(index=np.int64))).indices.dtype == np.int64


@each_kind
@each_dtype
def test_scipy_reads_our_files_or_says_why_not(dtype: Any, kind: Any) -> None:
    A = matrix(dtype, kind)
    file = saved(A)
    if dtype in HALF_DTYPES:
        with pytest.raises(ValueError, match="does not support dtype"):
            sp.load_npz(file)
        return
    S = sp.load_npz(file)
    assert S.format == "bsr" and S.dtype == dtype and isinstance(S, sp.sparray) == (kind is bg.bsr_array)
    assert [bits(x) for x in (S.data, S.indices, S.indptr)] == [bits(x) for x in A._blocks]


@pytest.mark.parametrize("kind", ["array", "matrix"])
@pytest.mark.parametrize("format", ["bsr", "csr", "csc", "coo", "dia"])
def test_files_of_scipy_are_read(format: str, kind: str, tmp_path: Path) -> None:
    dense = np.kron(np.diag([1.0, 2, 3]) + np.eye(3, k=1), np.ones((2, 2)))
    path = tmp_path / "S.npz"
    sp.save_npz(path, getattr(sp, f"{format}_{kind}")(dense))
    for options, blocksize in (({}, (2, 2)), ({"blocksize": (3, 2)}, (3, 2))):
        A = bg.load_npz(path, **options)  # type: ignore[arg-type]
        assert isinstance(A, bg.bsr_array if kind == "array" else bg.bsr_matrix) and A.blocksize == blocksize
        np.testing.assert_array_equal(A.toarray(), dense)


def test_half_matrices_that_scipy_saved_are_read() -> None:
    for dtype in HALF_DTYPES:
        file = io.BytesIO()
        sp.save_npz(file, matrix(dtype))
        file.seek(0)
        A = bg.load_npz(file)
        assert A.dtype == dtype and bits(A.data) == bits(matrix(dtype).data)


def test_numbers_of_the_other_byte_order_are_read() -> None:
    A = matrix()
    swapped = {name: x.astype(x.dtype.newbyteorder()) for name, x in A._blocks._asdict().items()}
    B = bg.load_npz(archive(format=b"bsr", shape=A.shape, **swapped))
    assert B.dtype == A.dtype and [bits(x) for x in B._blocks] == [bits(x) for x in A._blocks]


def test_names_get_the_suffix_and_both_kinds_of_path_are_taken(tmp_path: Path) -> None:
    bg.save_npz(tmp_path / "A", matrix())
    assert bg.load_npz(tmp_path / "A.npz").shape == bg.load_npz(str(tmp_path / "A.npz")).shape == (6, 12)
    with pytest.raises(FileNotFoundError):
        bg.load_npz(tmp_path / "A")


# --------------------------------------------------------------------------------------- bad files
class Trap:
    """Records that it was unpickled."""

    sprung = False

    def __reduce__(self) -> Any:
        return spring, ()


def spring() -> int:
    Trap.sprung = True
    return 0


def good() -> dict[str, Any]:
    A = matrix()
    return {"format": b"bsr", "shape": A.shape, "_is_array": True, **A._blocks._asdict()}


def csr(**change: Any) -> dict[str, Any]:
    S = sp.csr_array(np.array([[1.0, 0, 2], [0, 3, 0]]))
    return {"format": b"csr", "shape": S.shape, "data": S.data, "indices": S.indices, "indptr": S.indptr} | change


def coo(**change: Any) -> dict[str, Any]:
    return {"format": b"coo", "shape": (2, 3), "data": np.ones(2), "row": np.arange(2), "col": np.arange(2)} | change


BIG = np.iinfo(np.int64).max
BAD = {
    "no format": {name: x for name, x in good().items() if name != "format"},
    "unknown format": good() | {"format": b"lil"},
    "a format of many": good() | {"format": np.array([b"bsr", b"bsr"])},
    "no data": {name: x for name, x in good().items() if name != "data"},
    "negative shape": good() | {"shape": (-6, 12)},
    "three sides": good() | {"shape": (6, 12, 1)},
    "fractions": good() | {"shape": (6.0, 12.0)},
    "huge": good() | {"shape": (BIG, BIG)},
    "too small": good() | {"shape": (6, 9)},
    "does not divide": good() | {"shape": (6, 13)},
    "more rows": good() | {"shape": (8, 12)},
    "flat data": good() | {"data": np.ones(30)},
    "empty blocks": good() | {"data": np.ones((5, 0, 3))},
    "objects": good() | {"data": np.array([Trap()] * 5)},
    "records": good() | {"data": np.zeros((5, 2, 3), "f8,f8")},
    "dates": good() | {"data": np.zeros((5, 2, 3), "M8[s]")},
    "text": good() | {"data": np.full((5, 2, 3), "a")},
    "fewer blocks": good() | {"data": np.ones((4, 2, 3))},
    "index too large": good() | {"indices": np.array([3, 0, 0, 1, 4])},
    "index negative": good() | {"indices": np.array([3, 0, 0, 1, -1])},
    "index beyond int64": good() | {"indices": np.array([3, 0, 0, 1, 2**64 - 1], np.uint64)},
    "float indices": good() | {"indices": np.array([3.0, 0, 0, 1, 1])},
    "indices in 2-D": good() | {"indices": np.zeros((5, 1), int)},
    "indptr falls": good() | {"indptr": np.array([0, 3, 2, 5])},
    "indptr begins late": good() | {"indptr": np.array([1, 3, 3, 5])},
    "indptr ends late": good() | {"indptr": np.array([0, 3, 3, 6])},
    "indptr overflows": good() | {"indptr": np.array([0, BIG, -2, 5])},
    "indptr overflows in int32": good() | {"indptr": np.array([0, 2**31 - 1, -2, 5], np.int32)},
    "csr index": csr(indices=np.array([0, 3, 1])),
    "csr indptr": csr(indptr=np.array([0, BIG, 3])),
    "csr sizes": csr(data=np.ones(2)),
    "csc index": csr(format=b"csc", shape=(3, 2), indices=np.array([0, 10**6, 1])),
    "csc indptr": csr(format=b"csc", shape=(3, 2), indptr=np.array([0, 10**6, 3])),
    "coo row": coo(row=np.array([0, 2])),
    "coo negative": coo(col=np.array([0, -1])),
    "coo sizes": coo(col=np.zeros(3, int)),
    "coo data in 2-D": coo(data=np.ones((2, 1))),
    "three coords": coo(coords=np.zeros((3, 2), int)),
    "dia offsets": {"format": b"dia", "shape": (2, 2), "data": np.ones((2, 2)), "offsets": np.zeros(2, int)},
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_with_wrong_arrays_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, **BAD[name])
    with pytest.raises(ValueError, match=r"^file: '.*bad\.npz' holds no valid matrix: "):
        bg.load_npz(path)
    assert not Trap.sprung


def test_the_arrays_that_the_bad_files_change_are_good() -> None:
    for arrays in (good(), csr(), csr(format=b"csc", shape=(3, 2)), coo()):
        bg.load_npz(archive(**arrays))


def test_foreign_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "foreign.npz"
    npy = io.BytesIO()
    np.save(npy, np.ones(3))
    text = io.BytesIO()
    with zipfile.ZipFile(text, "w") as file:
        file.writestr("format.npy", "no array")
    for content in (b"", b"text", pickle.dumps(Trap()), npy.getvalue(), text.getvalue()):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"^file: '.*foreign\.npz' "):
            bg.load_npz(path)
    assert not Trap.sprung
    with pytest.raises(ValueError, match=r"^file: .*BytesIO.* is truncated or not an \.npz file"):
        bg.load_npz(io.BytesIO(b"text"))


@pytest.mark.parametrize("compressed", [True, False])
def test_a_truncated_file_is_refused_at_every_length(compressed: bool) -> None:
    content = saved(matrix(), compressed=compressed).getvalue()
    for length in range(0, len(content), 7):
        with pytest.raises(ValueError, match=r"^file: "):
            bg.load_npz(io.BytesIO(content[:length]))


@given(st.data())
def test_a_file_with_wrong_bytes_gives_a_valid_matrix_or_an_error(data: st.DataObject) -> None:
    content = bytearray(saved(matrix(), compressed=data.draw(st.booleans())).getvalue())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        A = bg.load_npz(io.BytesIO(bytes(content)))
    except ValueError as error:
        assert str(error).startswith("file: ")
    else:
        A.check_format(full_check=True)


def with_header(shape: tuple[int, ...], method: int) -> bytes:
    """A file whose array `data` has only a header, of this shape."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(saved(matrix())) as old, zipfile.ZipFile(changed := io.BytesIO(), "w", method) as new:
        for info in old.infolist():
            new.writestr(info.filename, header.getvalue() if info.filename == "data.npy" else old.read(info))
    return changed.getvalue()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("shape", [(10**15,), (2**40, 2**40), (4,)])
def test_an_array_that_claims_more_than_it_has_takes_no_memory(shape: tuple[int, ...], method: int) -> None:
    with pytest.raises(ValueError, match=r"data\.npy: wanted \d+ bytes"):
        bg.load_npz(io.BytesIO(with_header(shape, method)))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_archive_that_claims_more_than_it_has_takes_no_memory(method: int) -> None:
    content = bytearray(with_header((2**28,), method))
    entry = content.rindex(b"data.npy") - 46  # of the table at the end, where the size is at byte 24
    assert content[entry : entry + 4] == b"PK\1\2"
    content[entry + 24 : entry + 28] = (128 + 2**31).to_bytes(4, "little")
    with pytest.raises(ValueError, match=r"data\.npy: wanted 2147483776 bytes"):
        bg.load_npz(io.BytesIO(bytes(content)))


def test_objects_are_named_as_such() -> None:
    with pytest.raises(ValueError, match=r"data\.npy: holds object, wanted plain numbers"):
        bg.load_npz(archive(**BAD["objects"]))


def test_other_compressions_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted data that is stored or deflated"):
        bg.load_npz(io.BytesIO(with_header((4,), zipfile.ZIP_BZIP2)))


# --------------------------------------------------------------------------------------- arguments
def test_only_our_valid_matrices_are_saved(backend: Backend) -> None:
    with pytest.raises(TypeError, match=r"^A: wanted a bsr_array or bsr_matrix, got csr_array; scipy"):
        bg.save_npz(io.BytesIO(), sp.csr_array((2, 2)))
    A = matrix().to_device(backend.name)
    A.indices[0] = 9
    with pytest.raises(ValueError, match="indices: column index values must be < 4"):
        bg.save_npz(io.BytesIO(), A)


def test_wrong_options_of_load_npz_are_told() -> None:
    file = saved(matrix())
    with pytest.raises(ValueError, match="does not divide"):
        bg.load_npz(file, blocksize=(4, 5))
    file.seek(0)
    with pytest.raises(ValueError, match=r"^device: got 'tpu'"):
        bg.load_npz(file, device="tpu")
