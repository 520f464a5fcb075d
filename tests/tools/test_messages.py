"""Messages that a new user meets: no CuPy, no driver, slices and shapes that do not fit the blocks."""

from __future__ import annotations

import inspect
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import _environment
from bsrgemm._backend import registry
from bsrgemm._kernels import jit

REASON = "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"


class CudaInterface:
    """What a library's array on a card looks like."""

    __cuda_array_interface__ = {"shape": (4, 4), "typestr": "<f4", "data": (4096, False), "version": 3}  # noqa: RUF012


def small() -> Any:
    return bg.bsr_array(np.eye(32, dtype=np.float32), blocksize=(16, 16))


def saved() -> Any:
    file = io.BytesIO()
    bg.save_npz(file, small())
    file.seek(0)
    return file


#: Every public call that a device can be named in, and some that bring an array of a card.
DEVICE_CALLS: dict[str, Callable[[], Any]] = {
    "A.to_device": lambda: small().to_device("cuda"),
    "bsr_array of a dense array": lambda: bg.bsr_array(np.eye(4), device="cuda"),
    "bsr_array of a shape": lambda: bg.bsr_array((4, 4), device="cuda"),
    "bsr_array of three arrays": lambda: bg.bsr_array((np.ones((1, 2, 2)), [0], [0, 1]), device="cuda"),
    "bsr_array of elements": lambda: bg.bsr_array((np.ones(2), ([0, 1], [0, 1])), device="cuda"),
    "bsr_array of an array on a card": lambda: bg.bsr_array(CudaInterface(), blocksize=(2, 2)),
    "bsr_matrix": lambda: bg.bsr_matrix(small(), device="cuda"),
    "diags": lambda: bg.diags(np.ones((2, 2, 2)), device="cuda"),
    "eye": lambda: bg.eye(4, blocksize=(2, 2), device="cuda"),
    "random": lambda: bg.random(4, 4, blocksize=(2, 2), device="cuda"),
    "load_npz": lambda: bg.load_npz(saved(), device="cuda"),
    "from_dense": lambda: bg.from_dense(np.eye(4), (2, 2), device="cuda"),
    "from_dense of an array on a card": lambda: bg.from_dense(CudaInterface(), (2, 2)),
    "KVCache": lambda: bg.KVCache(1, 1, 32, 16, device="cuda"),
    "BlockMask.causal": lambda: bg.BlockMask.causal(32, device="cuda"),
    "BlockMask.dilated": lambda: bg.BlockMask.dilated(32, count=2, dilation=2, device="cuda"),
    "BlockMask.documents": lambda: bg.BlockMask.documents([0, 16, 32], device="cuda"),
    "BlockMask.full": lambda: bg.BlockMask.full(32, device="cuda"),
    "BlockMask.global_tokens": lambda: bg.BlockMask.global_tokens(32, tokens=2, device="cuda"),
    "BlockMask.prefix": lambda: bg.BlockMask.prefix(32, length=2, device="cuda"),
    "BlockMask.random": lambda: bg.BlockMask.random(32, per_row=1, device="cuda"),
    "BlockMask.sinks": lambda: bg.BlockMask.sinks(32, count=2, device="cuda"),
    "BlockMask.to_device": lambda: bg.BlockMask.causal(32, device="cpu").to_device("cuda"),
    "BlockMask.window": lambda: bg.BlockMask.window(32, left=3, right=0, device="cuda"),
    "BlockMask.from_dense of an array on a card": lambda: bg.BlockMask.from_dense(CudaInterface()),
    "attention of arrays on a card": lambda: bg.attention(*(CudaInterface(),) * 3),
}


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy")

    def refuse(*args: Any) -> Any:
        raise cupy.cuda.runtime.CUDARuntimeError(35)

    monkeypatch.setattr(cupy.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", refuse)
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", refuse)


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize("name", DEVICE_CALLS)
def test_cupy_without_a_driver_is_explained_wherever_a_device_is_needed(name: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        DEVICE_CALLS[name]()
    assert type(caught.value) is RuntimeError
    for part in (REASON, "nvidia-smi", "on the CPU work without it", "python -m bsrgemm info"):
        assert part in str(caught.value)


def test_every_public_call_with_a_device_is_in_the_list() -> None:
    places = [(name, getattr(bg, name)) for name in bg.__all__]
    places += [(f"BlockMask.{name}", f) for name, f in inspect.getmembers(bg.BlockMask, callable) if name[0] != "_"]
    for name, place in places:
        if callable(place) and "device" in inspect.signature(place).parameters:
            assert any(call.split(" of ")[0] == name for call in DEVICE_CALLS), name


@pytest.mark.usefixtures("no_driver")
def test_a_pickle_of_a_matrix_on_a_card_is_explained_without_a_driver() -> None:
    with pytest.raises(RuntimeError, match="nvidia-smi"):
        pickle.loads(pickle.dumps(registry.cuda()))


@pytest.mark.usefixtures("no_driver")
def test_info_gives_the_same_reason() -> None:
    (line,) = _environment.info()["missing"]
    assert REASON in line and "nvidia-smi" in line


def test_install_hints_work_from_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # an import of it now fails
    monkeypatch.setattr(registry, "_CUDA", None)
    with pytest.raises(ImportError) as caught:
        bg.bsr_array(np.eye(4), device="cuda")
    for said in (str(caught.value), _environment.info()["missing"][0], jit._missing("CuPy", ImportError("x"))):
        assert 'pip install "bsrgemm[cuda12]"' in said and 'pip install ".[cuda12]"' in said


# ------------------------------------------------------------------------------ blocks that do not fit
@pytest.mark.parametrize(
    ("call", "error", "way"),
    [
        (lambda: small()[3:20], NotImplementedError, "slice 0:32, or use A.tocsr()[3:20]"),
        (lambda: small()[:, 16:30], NotImplementedError, "slice 16:32, or use A.tocsr()[16:30]"),
        (lambda: small()[::2], NotImplementedError, "use A.tocsr()[0:32:2]"),
        (
            lambda: bg.bsr_array(np.ones((10, 12)), blocksize=(4, 4)),
            ValueError,
            "Take blocks of (2, 4), which divide it, or pad the matrix with zeros to (12, 12)",
        ),
        (lambda: small().tobsr((5, 16)), ValueError, "Take blocks of (4, 16)"),
        (lambda: bg.from_dense(np.ones((7, 4)), (2, 2)), ValueError, "pad the matrix with zeros to (8, 4)"),
        (lambda: bg.bsr_array((np.ones((1, 2, 2)), [0], [0, 1]), shape=(2, 3)), ValueError, "zeros to (2, 4)"),
    ],
)
def test_blocks_that_do_not_fit_name_the_way_out(call: Callable[[], Any], error: type[Exception], way: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert way in str(caught.value)


def test_the_ways_out_lead_there() -> None:
    A = small()
    np.testing.assert_array_equal(A.tocsr()[3:20].toarray(), A.toarray()[3:20])
    assert A[0:32].shape == (32, 32)
    assert bg.bsr_array(np.ones((10, 12)), blocksize=(2, 4)).blocksize == (2, 4)
