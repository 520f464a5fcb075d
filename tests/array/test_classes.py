"""The public classes: their signature, subclasses that users write, and moves on a stream."""

from __future__ import annotations

import copy
import inspect
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import bsrgemm as bg
from bsrgemm._backend.base import Backend
from bsrgemm.dtypes import BFLOAT16

from .. import fake_cupy

pytestmark = pytest.mark.fake

EYE = np.eye(4)


class Named(bg.bsr_array):
    """A subclass with a method, and the constructor of `bsr_array`."""

    def twice(self) -> Any:
        return self + self


class Laplace(bg.bsr_matrix):
    """A subclass with a constructor of its own."""

    def __init__(self, n: int, device: str, scale: float = 1.0) -> None:
        super().__init__(scale * np.eye(n), blocksize=(2, 2), device=device)
        self.scale = scale


class FromArrays(bg.bsr_array):
    """A subclass whose data is on the device of an argument that __new__ cannot know."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings["dense"], blocksize=(2, 2))


# --------------------------------------------------------------------------------------- signature
@pytest.mark.parametrize("cls", [bg.bsr_array, bg.bsr_matrix, Named])
def test_the_signature_of_a_class_is_that_of_its_constructor(cls: type) -> None:
    names = ["arg1", "shape", "dtype", "copy", "blocksize", "maxprint", "device"]
    parameters = inspect.signature(cls).parameters
    assert list(parameters) == names
    assert parameters["arg1"].default is inspect.Parameter.empty and parameters["copy"].default is False
    assert parameters["device"].kind is inspect.Parameter.KEYWORD_ONLY
    assert list(inspect.signature(type(bg.bsr_array(EYE))).parameters) == names


def test_a_subclass_with_another_constructor_shows_that() -> None:
    assert list(inspect.signature(Laplace).parameters) == ["n", "device", "scale"]


# -------------------------------------------------------------------------------------- subclasses
def test_a_subclass_works_on_every_device(backend: Backend) -> None:
    A = Named(backend.from_host(EYE), blocksize=(2, 2))
    assert isinstance(A, Named) and A._backend is backend and type(A) is type(Named((2, 2), device=backend.name))
    assert isinstance(A, bg.bsr_array) and backend.is_sparse(A)
    for result in (A.twice(), A @ A, A.T, A.copy(), A[:2, :2], A.astype(np.float32), 2 * A, A.tobsr((1, 1))):
        assert isinstance(result, Named) and result._backend is backend
    np.testing.assert_array_equal(backend.to_host(A.twice().toarray()), 2 * EYE)
    np.testing.assert_array_equal(backend.to_host(A @ backend.from_host(EYE)), EYE)


def test_a_subclass_is_kept_by_moves_copies_and_pickles(backend: Backend) -> None:
    A = Named(EYE.astype(BFLOAT16), blocksize=(2, 2)).to_device(backend.name)
    assert isinstance(A, Named) and A._backend is backend
    assert isinstance(A.get(), Named) and A.get().device == "cpu"
    for B in (pickle.loads(pickle.dumps(A)), copy.copy(A), copy.deepcopy(A)):
        assert type(B) is type(A) and B.dtype == BFLOAT16
        np.testing.assert_array_equal(B.get().toarray().astype(float), EYE)


def test_a_subclass_may_have_another_constructor(backend: Backend) -> None:
    A = Laplace(4, backend.name, scale=3.0)
    assert isinstance(A, Laplace) and isinstance(A, bg.bsr_matrix) and A._backend is backend and A.scale == 3
    np.testing.assert_array_equal(backend.to_host(A.toarray()), 3 * EYE)
    B = FromArrays({"dense": backend.from_host(EYE)})
    assert isinstance(B, FromArrays) and B._backend is backend
    np.testing.assert_array_equal(backend.to_host(B.toarray()), EYE)


def test_subclasses_of_the_same_name_are_different_classes() -> None:
    def make() -> type:
        class Same(bg.bsr_array):
            pass

        return Same

    first, second = make(), make()
    A, B = first(EYE), second(EYE)
    assert isinstance(A, first) and not isinstance(A, second) and isinstance(B, second)


def test_the_classes_without_subclass_are_as_before() -> None:
    A = bg.bsr_array(EYE)
    assert type(A).__name__ == "host_bsr_array" and type(pickle.loads(pickle.dumps(A))) is type(A)
    assert isinstance(bg.vstack([Named(EYE), A]), bg.bsr_array) and isinstance(Named(EYE), sp.sparray)


# ----------------------------------------------------------------------------------------- streams
class Stream:
    """A stream of a fake card: remembers which of them is current."""

    current: Any = None
    null: Any
    ptds: Any

    def __init__(self, address: int = 0) -> None:
        self.ptr = address

    @staticmethod
    def from_external(stream: Any) -> ExternalStream:
        version, address = stream.__cuda_stream__()
        assert version == 0
        return ExternalStream(address)

    def __enter__(self) -> None:
        Stream.current = self

    def __exit__(self, *_: Any) -> None:
        Stream.current = None


class ExternalStream(Stream):
    """A stream of another library."""


class Foreign:
    """A stream as other libraries hand it out."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.address)


Stream.null, Stream.ptds = Stream(), Stream()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The streams that were current when an array was copied to a fake card."""
    device = fake_cupy.backend()
    seen: list[Any] = []
    from_host = device.from_host

    def record(x: Any) -> Any:
        seen.append(Stream.current)
        return from_host(x)

    cuda = SimpleNamespace(Stream=Stream, ExternalStream=ExternalStream)
    for name, value in vars(cuda).items():
        monkeypatch.setattr(device.xp.cuda, name, value, raising=False)
    monkeypatch.setattr(device, "from_host", record)
    return seen


def test_a_copy_to_the_gpu_is_enqueued_on_the_stream(copies: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    A = bg.bsr_array(EYE, blocksize=(2, 2))
    mine = Stream(5)
    for stream, expected in (
        (mine, mine),
        (None, None),
        (1, Stream.null),
        (2, Stream.ptds),
        (SimpleNamespace(cuda_stream=0), Stream.null),
        (Foreign(0), Stream.null),
    ):
        copies.clear()
        B = A.to_device("cuda", stream=stream)
        device = fake_cupy.backend()
        assert copies == [expected] * 3 and B.device == device.xp.cuda.Device() and Stream.current is None
        assert B.to_device("cuda", stream=stream) is B
    for old in (False, True):
        if old:  # a CuPy that has no Stream.from_external
            monkeypatch.delattr(Stream, "from_external")
        for stream in (4096, np.int64(4096), SimpleNamespace(cuda_stream=4096), Foreign(4096)):
            copies.clear()
            A.to_device("cuda", stream=stream)
            assert [type(x) for x in copies] == [ExternalStream] * 3 and copies[0].ptr == 4096


def test_wrong_streams_are_told(copies: list[Any]) -> None:
    A = bg.bsr_array(EYE, blocksize=(2, 2))
    with pytest.raises(ValueError, match=r"^stream: wanted None for device 'cpu', got 1; A\.get"):
        A.to_device("cpu", stream=1)
    for stream in (0, -1):
        with pytest.raises(ValueError, match=rf"^stream: wanted 1, 2 or the address of a CUDA stream, got {stream}"):
            A.to_device("cuda", stream=stream)
    for wrong in (True, 1.5, "1"):
        with pytest.raises(TypeError, match=r"^stream: wanted a CUDA stream, an integer or None, got "):
            A.to_device("cuda", stream=wrong)
    with pytest.raises(ValueError, match=r"^device: got 'tpu'"):
        A.to_device("tpu", stream=1)


@pytest.mark.gpu
def test_a_stream_of_cupy_and_its_address_are_taken() -> None:
    import cupy

    A = bg.random(640, 640, blocksize=(16, 16), density=0.5, seed=1)
    stream = cupy.cuda.Stream(non_blocking=True)
    for given in (stream, stream.ptr, 1, 2):
        B = A.to_device("cuda", stream=given)
        cupy.cuda.Device().synchronize()
        np.testing.assert_array_equal(B.get().data, A.data)
