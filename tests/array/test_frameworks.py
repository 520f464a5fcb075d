"""Tensors of other libraries: bfloat16, gradients, BSR tensors of torch, and the reason where one is refused.

The classes here export through DLPack as torch and JAX do; where these are installed, they are tried too.
"""

from __future__ import annotations

import ctypes
import warnings
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._backend import dlpack, registry
from bsrgemm.interop import mpi

from .. import fake_cupy
from ..fake_cupy.modules import OnHost

pytestmark = pytest.mark.fake

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

    def __init__(
        self,
        x: Any,
        version: tuple[int, int] | None = None,
        requires_grad: bool = False,
        read_only: bool = False,
    ) -> None:
        self.x, self.version, self.requires_grad = np.asarray(x), version, requires_grad
        self.read_only = read_only
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
        made = _Plain() if self.version is None else _Versioned(major=1, minor=0, flags=self.read_only)
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


def test_scales_of_heads_are_taken_from_a_tensor() -> None:
    q = np.arange(256, dtype=np.uint8).reshape(1, 2, 16, 8) % 56
    scale = np.array([0.5, 2.0], np.float32)
    options: dict[str, Any] = {"k_scale": 1.0, "v_scale": 1.0}
    found = bg.attention(q, q, q, q_scale=Tensor(scale, (1, 0)), **options)
    np.testing.assert_array_equal(found, bg.attention(q, q, q, q_scale=scale, **options))


def test_a_tensor_of_another_dtype_is_not_taken_for_bfloat16() -> None:
    x = numbers((3, 2), np.float32)
    found = registry.host().adopt(Tensor(x))
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, x)


# --------------------------------------------------------------------------------- tensors on a card
class OnACard(Tensor):
    """A tensor on a card as torch has them; its memory is NumPy's, and so are the arrays that CuPy makes of it."""

    def __init__(self, x: Any, version: Any = (1, 0), interface: str | None = None, read_only: bool = False) -> None:
        super().__init__(x, version, read_only=read_only)
        self.streams: list[Any] = []
        if interface is not None:
            address = self.x.ctypes.data, read_only
            about = {"shape": self.shape, "strides": self.x.strides, "typestr": interface, "data": address}
            self.__cuda_array_interface__ = about | {"version": 2}

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        self.streams.append(stream)
        if stream == 2:
            raise BufferError("per-thread default stream is not supported.")
        return super().__dlpack__(**options)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend of CuPy where the current stream is the first of `streams`; nothing is captured."""
    cupy_backend = pytest.importorskip("bsrgemm._backend.cupy_backend")
    found = cupy_backend.CupyBackend()
    found.stream = 1

    def from_dlpack(x: Any) -> Any:
        """CuPy asks for the newest version first."""
        try:
            return np.from_dlpack(OnHost(x.__dlpack__(stream=found.stream, max_version=(1, 0))))
        except TypeError:
            return np.from_dlpack(OnHost(x.__dlpack__(stream=found.stream)))

    def asarray(x: Any) -> Any:
        """The interface has no type for bfloat16: it comes as V2."""
        about = x.__cuda_array_interface__
        return np.asarray(SimpleNamespace(__array_interface__=about | {"version": 3}))

    model = SimpleNamespace(ndarray=(), from_dlpack=from_dlpack, asarray=asarray)
    monkeypatch.setattr(cupy_backend, "cupy", model)
    monkeypatch.setattr(cupy_backend.graphs, "is_capturing", lambda: found.stream == "captures")
    return found


@each_version
@pytest.mark.parametrize("interface", [None, "|V2", "<V2"])
def test_bfloat16_on_a_card_is_read_without_a_copy(card: Any, version: Any, interface: Any) -> None:
    x = numbers((5, 6))[:, ::2]
    found = card.adopt(OnACard(x, version, interface))
    assert found.dtype == BF16
    assert np.shares_memory(found, x) and found.strides == x.strides


def test_a_tensor_on_a_card_that_is_refused_is_not_read_by_its_address(card: Any) -> None:
    """The numbers at the address of a conjugate view are not those of the view."""

    class Conjugate(OnACard):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("Can't export tensors with the conjugate bit set")

    with pytest.raises(dlpack.Unreadable, match="resolve_conj"):
        card.adopt(Conjugate(np.ones(3, np.complex64), interface="<c8"))


def test_a_view_whose_signs_torch_changes_later_is_refused() -> None:
    """torch exports the numbers of such a view as they were before."""
    negated = Tensor(np.ones((6, 3), np.float32))
    negated.is_neg = lambda: True  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"other: .*negative bit.* Pass x\.resolve_neg\(\)"):
        matrix() @ negated
    negated.is_neg = lambda: False  # type: ignore[attr-defined]
    np.testing.assert_array_equal(matrix() @ negated, matrix() @ negated.x)


def test_fp8_of_a_library_is_told_to_come_as_bytes() -> None:
    class Float8(Tensor):
        dtype = "torch.float8_e4m3fn"

        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("Unsupported dtype in DLTensor.")

    with pytest.raises(TypeError, match=r"Unsupported dtype.*pass x\.view\(torch\.uint8\) and a scale"):
        matrix() @ Float8(np.ones((6, 3)))


def test_a_tensor_waits_for_the_stream_that_writes_it(card: Any) -> None:
    """torch refuses the stream of a thread; what a graph records waits for nothing outside of it."""
    for stream, asked in ((1, [1]), (77, [77]), (2, [2, 1]), ("captures", [-1])):
        tensor, card.stream = OnACard(np.ones(3)), stream
        card.adopt(tensor)
        assert tensor.streams == asked


@pytest.mark.parametrize("version, interface", [((1, 0), None), ((1, 0), "<f8"), (None, "<f8")])
def test_a_tensor_on_a_card_holds_a_result_unless_it_is_read_only(card: Any, version: Any, interface: Any) -> None:
    x = np.zeros(3)
    assert np.shares_memory(card.adopt(OnACard(x, version, interface), writes=True), x)
    protected = OnACard(x, version, interface, read_only=True)
    assert np.shares_memory(card.adopt(protected), x)
    with pytest.raises(dlpack.ReadOnly, match="exports as read-only cannot hold a result"):
        card.adopt(protected, writes=True)


def test_an_export_that_does_not_say_that_it_may_be_written_holds_no_result(card: Any) -> None:
    """Before version 1 of DLPack, JAX exports arrays that must not change."""
    with pytest.raises(dlpack.ReadOnly):
        card.adopt(OnACard(np.zeros(3), None), writes=True)


@pytest.mark.parametrize("read_only", [False, True])
def test_an_array_with_the_interface_alone_is_read_and_written(card: Any, read_only: bool) -> None:
    tensor = SimpleNamespace(
        __cuda_array_interface__=OnACard(np.ones(3), None, "<f8", read_only).__dict__.get("__cuda_array_interface__")
    )
    np.testing.assert_array_equal(card.adopt(tensor), 1)
    if read_only:
        with pytest.raises(dlpack.ReadOnly):
            card.adopt(tensor, writes=True)
    else:
        card.adopt(tensor, writes=True)


# ----------------------------------------------------------------------------------------- results
def results(place: str) -> dict[str, Any]:
    """By name, a call with an `out` or None, and where among its results that one is."""
    here: Any = (lambda x: x) if place == "cpu" else fake_cupy.xp.asarray
    A, B, X = matrix(), numbers((6, 3), np.float32), numbers((2, 6, 3), np.float32)
    if place != "cpu":
        A = A.to_device("cuda")
    q, k, v = (here(numbers((1, 2, 16, 8), np.float32) * n) for n in (1, 2, 3))
    states = [bg.attention(q, k, v, return_lse=True), bg.attention(k, q, v, return_lse=True)]
    found: dict[str, Any] = {
        "matmul": lambda out: bg.matmul(A, here(B), out=out),
        "matmul, left": lambda out: bg.matmul(here(numbers((5, 4), np.float32)), A, out=out),
        "matmul, a vector": lambda out: bg.matmul(A, here(B[:, 0].copy()), out=out),
        "matmul, a batch": lambda out: bg.matmul(A, here(X), out=out),
        "sum": lambda out: A.sum(axis=0, out=out),
        "mean": lambda out: A.mean(axis=1, out=out),
        "toarray": lambda out: A.toarray(out=out),
        "todense": lambda out: bg.bsr_matrix(A).todense(out=out),
        "attention": lambda out: bg.attention(q, k, v, out=out),
        "attention with sums": lambda out: bg.attention(q, k, v, out=out, return_lse=True)[0],
        "merge_states": lambda out: bg.merge_states(*zip(*states, strict=True), out=out)[0],
        "a matrix over ranks": lambda out: mpi.partition(A).multiply(here(B), out=out),
    }
    if place == "cpu":
        cache = bg.KVCache(1, 2, 32, 8, dtype=np.float32, device="cpu")
        cache.append(k, v)
        out, lse = states[0]
        found |= {
            "attention_decode": lambda out: bg.attention_decode(q[:, :, :1], cache, out=out),
            "dq": lambda dq: bg.attention_backward(v, q, k, v, out, lse, dq=dq)[0],
            "dk": lambda dk: bg.attention_backward(v, q, k, v, out, lse, dk=dk)[1],
            "dv": lambda dv: bg.attention_backward(v, q, k, v, out, lse, dv=dv)[2],
        }
    return found


#: The names of all calls with results, those on the host alone at the end.
RESULTS = list(results("cpu"))


@pytest.mark.parametrize(
    "place, name", [*(("cpu", name) for name in RESULTS), *(("cuda", name) for name in RESULTS[:-4])]
)
def test_every_result_is_written_into_a_tensor_that_is_returned(place: str, name: str) -> None:
    def tensor(x: Any, read_only: bool = False) -> Any:
        if place == "cpu":
            return Tensor(x, (1, 0), read_only=read_only)
        return OnACard(x, (1, 0), read_only=read_only)

    call = results(place)[name]
    want = call(None)
    want = np.asarray(want if place == "cpu" else want.get())
    memory = np.full(want.shape, 99, want.dtype)
    given = tensor(memory)
    for _ in range(2):  # the second call is a known one where calls are remembered
        assert call(given) is given
        np.testing.assert_array_equal(memory, want)
        memory.fill(99)
    with pytest.raises(ValueError, match=r"^(out|dq|dk|dv): .* (Tensor|OnACard) that its library exports as read-only"):
        call(tensor(memory, read_only=True))
    with pytest.raises(TypeError, match=rf"^(out|dq|dk|dv): wanted a dense array on '{place}'.*, got a list"):
        call([0.0])
    assert (memory == 99).all()


def test_a_tensor_without_a_version_is_not_written_to() -> None:
    with pytest.raises(ValueError, match="out: a tests Tensor that its library exports as read-only"):
        bg.matmul(matrix(), numbers((6, 3), np.float32), out=Tensor(np.zeros((4, 3), np.float32)))


def test_a_tensor_that_overlaps_an_operand_or_does_not_fit_is_refused_as_a_result() -> None:
    A, x = matrix(), np.ones((6, 6), np.float32)
    with pytest.raises(ValueError, match="out: overlaps"):
        bg.matmul(A, x, out=Tensor(x[:4], (1, 0)))
    with pytest.raises(ValueError, match=r"out: wanted float32 of shape \(4, 6\), got float32 of shape \(4, 5\)"):
        bg.matmul(A, x, out=Tensor(np.zeros((4, 5), np.float32), (1, 0)))


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
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.zeros(4, 3, dtype=dtype)
        assert bg.matmul(A, tensor, out=out) is out
        np.testing.assert_array_equal(out.float().numpy(), bg.matmul(A, x, out_dtype="float32"))
    q = torch.randn(1, 2, 16, 8)
    out = torch.empty_like(q)
    assert bg.attention(q, q, q, out=out) is out
    np.testing.assert_array_equal(out.numpy(), bg.attention(*[q.numpy()] * 3))
    with pytest.raises(TypeError, match=r"out: .*pass x\.detach\(\)"):
        bg.matmul(A, tensor, out=torch.zeros(4, 3, requires_grad=True))
    with pytest.raises(TypeError, match=r"pass x\.detach\(\)"):
        A @ torch.ones(6, 3, requires_grad=True)
    with pytest.raises(TypeError, match=r"conjugate.*resolve_conj"):
        A @ torch.ones(6, 3, dtype=torch.complex64).conj()
    with pytest.raises(TypeError, match=r"negative bit.*resolve_neg"):
        A @ torch.ones(6, 3, dtype=torch.complex64).conj().imag
    with pytest.raises(TypeError, match=r"x\.view\(torch\.uint8\)"):
        A @ torch.ones(6, 3).to(torch.float8_e4m3fn)
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_torch_on_a_card(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    import cupy

    def on_card(x: Any) -> Any:
        return torch.tensor(x.astype(np.float32), device="cuda").to(getattr(torch, dtype))

    def as_numpy(x: Any) -> Any:
        cupy.cuda.get_current_stream().synchronize()
        return x.float().cpu().numpy()

    A, x = matrix().astype(dtype), numbers((6, 3), dtype if dtype != "bfloat16" else BF16)
    B, out = on_card(x), on_card(np.zeros((4, 3)))
    assert registry.cuda().adopt(B).data.ptr == B.data_ptr()
    for _ in range(2):
        out.zero_()
        torch.cuda.synchronize()
        assert bg.matmul(A.to_device("cuda"), B, out=out) is out
        np.testing.assert_array_equal(as_numpy(out), (A @ x).astype(np.float32))
    q, k, v = (numbers((1, 2, 32, 64), np.float32) / 4 for _ in range(3))
    out = on_card(np.zeros(q.shape))
    assert bg.attention(*map(on_card, (q, k, v)), out=out) is out
    np.testing.assert_allclose(as_numpy(out), bg.attention(q, k, v), atol=2e-2)
    with pytest.raises(TypeError, match="resolve_conj"):
        A.astype("complex64").to_device("cuda") @ torch.ones(6, 3, dtype=torch.complex64, device="cuda").conj()
