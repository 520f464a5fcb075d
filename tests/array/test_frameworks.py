"""Tensors of other libraries: bfloat16, gradients, BSR tensors of torch, and the reason where one is refused.

The classes here export through DLPack as torch and JAX do; where these are installed, they are tried too.
"""

from __future__ import annotations

import ctypes
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._backend import dlpack, registry

BF16 = np.dtype(ml_dtypes.bfloat16)
_DTYPE = {"f": 2, "u": 1, "i": 0, "b": 6, "V": 4, "c": 5}


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Plain(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


#: What was exported is never freed: these tensors have no deleter.
_EXPORTED: list[Any] = []


class Tensor:
    """An array of a library that knows bfloat16, such as torch; `version` None exports as before DLPack 1.0."""

    def __init__(self, x: Any, version: tuple[int, int] | None = None, requires_grad: bool = False) -> None:
        self.x, self.version, self.requires_grad = np.asarray(x), version, requires_grad
        self.shape = self.x.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        if self.requires_grad:
            raise RuntimeError("Can't export tensors that require gradient, use tensor.detach()")
        if options and self.version is None:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        x, n = self.x, self.x.ndim
        sizes = (ctypes.c_int64 * n)(*x.shape)
        strides = (ctypes.c_int64 * n)(*(s // x.itemsize for s in x.strides))
        code = 4 if x.dtype == BF16 else _DTYPE[x.dtype.kind]
        made = _Plain() if self.version is None else _Versioned(major=1, minor=0)
        made.tensor = _Tensor(x.ctypes.data, 1, 0, n, code, 8 * x.itemsize, 1, sizes, strides, 0)
        _EXPORTED.append((made, sizes, strides, x))
        name = b"dltensor" if self.version is None else b"dltensor_versioned"
        return _new_capsule(ctypes.addressof(made), name, None)


class BsrTensor:
    """What torch's BSR tensors offer."""

    def __init__(self, data: Any, indices: Any, indptr: Any, shape: tuple[int, ...], layout: str = "bsr") -> None:
        self._arrays = tuple(Tensor(x) for x in (data, indices, indptr))
        self.shape, self.layout = shape, f"torch.sparse_{layout}"

    def values(self) -> Any:
        return self._arrays[0]

    def col_indices(self) -> Any:
        return self._arrays[1]

    def crow_indices(self) -> Any:
        return self._arrays[2]

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **options: Any) -> Any:
        raise RuntimeError("Can't export tensors with layout other than torch.strided")


def matrix(dtype: Any = np.float32) -> Any:
    return bg.bsr_array((np.arange(1, 25).reshape(6, 2, 2).astype(dtype), [0, 1, 2, 0, 1, 2], [0, 3, 6]), shape=(4, 6))


def numbers(shape: tuple[int, ...], dtype: Any = BF16) -> Any:
    return (np.arange(np.prod(shape)).reshape(shape) % 7 - 3).astype(dtype)


each_version = pytest.mark.parametrize("version", [None, (1, 0)], ids=["unversioned", "versioned"])


# ---------------------------------------------------------------------------------------- bfloat16
@each_version
def test_bfloat16_of_a_framework_is_read_without_a_copy(version: Any) -> None:
    x = numbers((5, 6))[:, ::2]
    found = registry.host().adopt(Tensor(x, version))
    assert found.dtype == BF16
    assert np.shares_memory(found, x) and found.strides == x.strides
    np.testing.assert_array_equal(found, x)


@each_version
def test_bfloat16_of_a_framework_is_an_operand_everywhere(version: Any) -> None:
    A, x = matrix(BF16), numbers((6, 3))
    np.testing.assert_array_equal(A @ Tensor(x, version), A @ x)
    np.testing.assert_array_equal(bg.matmul(A, Tensor(x, version)), A @ x)
    np.testing.assert_array_equal((A + Tensor(numbers((4, 6)), version)), A + numbers((4, 6)))
    dense = numbers((4, 6))
    for made in (bg.bsr_array(Tensor(dense, version), blocksize=(2, 2)), bg.from_dense(Tensor(dense, version), (2, 2))):
        assert made.dtype == BF16
        np.testing.assert_array_equal(made.toarray(), dense)
    q, k, v = (numbers((1, 2, 16, 8)) for _ in range(3))
    out = bg.attention(*(Tensor(x, version) for x in (q, k, v)))
    np.testing.assert_array_equal(out, bg.attention(q, k, v))


def test_a_tensor_of_another_dtype_is_not_taken_for_bfloat16() -> None:
    x = numbers((3, 2), np.float32)
    bits = dlpack._Bits(Tensor(x))
    np.testing.assert_array_equal(np.from_dlpack(bits), x)
    assert not bits.changed


# ----------------------------------------------------------------------------------------- reasons
def calls_with(tensor: Any) -> dict[str, Any]:
    A, k = matrix(), numbers((1, 1, 16, 8), np.float32)
    cache = bg.KVCache(1, 1, 32, 8, device="cpu", dtype=np.float32)
    return {
        "other": lambda: A @ tensor,
        "B": lambda: bg.matmul(A, tensor),
        "arg1": lambda: bg.bsr_array(tensor, blocksize=(2, 2)),
        "X": lambda: bg.from_dense(tensor, (2, 2)),
        "data": lambda: bg.bsr_array((tensor, [0], [0, 1])),
        "allowed": lambda: bg.BlockMask.from_dense(tensor, block=16),
        "q": lambda: bg.attention(tensor, k, k),
        "k": lambda: bg.attention(k, tensor, k),
        "keys": lambda: cache.append(tensor, k),
        "value": lambda: A.__setitem__((slice(0, 2), slice(0, 2)), tensor),
    }


@pytest.mark.parametrize("name", calls_with(None))
def test_a_tensor_that_requires_a_gradient_is_told_to_detach(name: str) -> None:
    with pytest.raises(TypeError, match=r"require gradient.*pass x\.detach\(\)") as caught:
        calls_with(Tensor(np.ones((6, 6), np.float32), requires_grad=True))[name]()
    said = str(caught.value)
    assert "moved silently" not in said and not said.startswith("a "), said


def test_the_reason_of_the_library_is_in_the_message() -> None:
    class Refuses(Tensor):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("its storage is quantized")

    with pytest.raises(TypeError, match=r"other: a \w+ Refuses cannot be read through DLPack: its storage is quantiz"):
        matrix() @ Refuses(np.ones((6, 2)))


def test_an_array_elsewhere_is_not_called_unreadable() -> None:
    class OnACard(Tensor):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    assert registry.host().adopt(OnACard(np.ones(3))) is None


def test_a_cuda_interface_that_raises_leaves_dlpack_to_decide() -> None:
    class NeedsDetach(Tensor):
        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad")

    assert registry.foreign_backend(NeedsDetach(np.ones(3))) is registry.host()


# --------------------------------------------------------------------------------------- BSR tensors
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
def test_a_bsr_tensor_becomes_a_matrix_without_a_copy(dtype: Any) -> None:
    A = matrix(dtype)
    found = bg.bsr_array(BsrTensor(A.data, A.indices.astype(np.int64), A.indptr.astype(np.int64), (4, 6)))
    assert found.dtype == dtype and found.blocksize == (2, 2) and found.shape == (4, 6)
    assert np.shares_memory(found.data, A.data)
    np.testing.assert_array_equal(found.toarray(), A.toarray())


def test_a_bsr_tensor_keeps_its_shape_where_the_last_block_columns_are_empty() -> None:
    tensor = BsrTensor(np.ones((1, 2, 2)), np.array([0]), np.array([0, 1, 1]), (4, 10))
    assert bg.bsr_array(tensor).shape == (4, 10)
    assert bg.bsr_matrix(tensor, dtype=np.float32).dtype == np.float32


def test_other_sparse_tensors_are_told_the_way() -> None:
    tensor = BsrTensor(np.ones(1), np.array([0]), np.array([0, 1]), (1, 1), layout="csr")
    with pytest.raises(TypeError, match=r"layout torch\.sparse_csr: pass x\.to_sparse_bsr\(\(R, C\)\)"):
        bg.bsr_array(tensor)
    batch = BsrTensor(np.ones((2, 1, 2, 2)), np.zeros((2, 1), int), np.array([[0, 1]] * 2), (2, 2, 2))
    with pytest.raises(ValueError, match="one by one"):
        bg.bsr_array(batch)


# --------------------------------------------------------------------------------------------- masks
def test_a_mask_from_a_tensor_of_booleans() -> None:
    allowed = np.tri(40, dtype=bool)
    mask = bg.BlockMask.from_dense(Tensor(allowed), block=16)
    np.testing.assert_array_equal(mask.to_dense(), allowed)
    with pytest.raises(TypeError, match="wanted booleans, got dtype float32"):
        bg.BlockMask.from_dense(Tensor(allowed.astype(np.float32)), block=16)
    with pytest.raises(TypeError, match="got list"):
        bg.BlockMask.from_dense([[True]], block=16)


# ----------------------------------------------------------------------------------- the real libraries
def test_torch_itself() -> None:
    torch = pytest.importorskip("torch")
    A, x = matrix(BF16), numbers((6, 3))
    tensor = torch.tensor(x.astype(np.float32)).to(torch.bfloat16)
    C = A @ tensor
    np.testing.assert_array_equal(C, A @ x)
    back = torch.from_dlpack(bg.matmul(A, tensor, out_dtype="float32"))
    np.testing.assert_array_equal(back.numpy(), bg.matmul(A, x, out_dtype="float32"))
    bits = torch.from_dlpack(C.view(np.uint16)).view(torch.bfloat16)
    np.testing.assert_array_equal(bits.float().numpy(), C.astype(np.float32))
    with pytest.raises(TypeError, match=r"pass x\.detach\(\)"):
        A @ torch.ones(6, 3, requires_grad=True)
    with pytest.raises(TypeError, match=r"conjugate.*resolve_conj"):
        A @ torch.ones(6, 3, dtype=torch.complex64).conj()
    with pytest.raises(TypeError, match="to_dense"):
        A @ torch.eye(6).to_sparse()
    allowed = torch.ones(20, 20, dtype=torch.bool).tril()
    np.testing.assert_array_equal(bg.BlockMask.from_dense(allowed, block=16).to_dense(), np.tri(20, dtype=bool))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its BSR layout a beta
        for dtype in (torch.float64, torch.bfloat16):
            bsr = torch.eye(8).to(dtype).to_sparse_bsr((2, 4))
            made = bg.bsr_array(bsr)
            assert made.blocksize == (2, 4)
            np.testing.assert_array_equal(made.toarray().astype(np.float64), np.eye(8))


def test_jax_itself() -> None:
    jnp = pytest.importorskip("jax.numpy")
    A, x = matrix(BF16), numbers((6, 3))
    np.testing.assert_array_equal(A @ jnp.asarray(x), A @ x)
    made = bg.bsr_array(jnp.asarray(numbers((4, 6))), blocksize=(2, 2))
    assert made.dtype == BF16
    np.testing.assert_array_equal(made.toarray(), numbers((4, 6)))
    allowed = bg.BlockMask.from_dense(jnp.tri(20, dtype=bool), block=16)
    np.testing.assert_array_equal(allowed.to_dense(), np.tri(20, dtype=bool))
