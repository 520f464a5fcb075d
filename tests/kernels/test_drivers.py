"""What is asked of CuPy and of the driver, where neither is there."""

from __future__ import annotations

import builtins
import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm._kernels import jit, tensor_map, workspace


def test_the_target_of_a_device_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def device(number: int) -> Any:
        asked.append(number)
        return SimpleNamespace(compute_capability="90" if number else "80")

    current = [0]
    cuda = SimpleNamespace(Device=device, runtime=SimpleNamespace(getDevice=lambda: current[0]))
    monkeypatch.setattr(jit, "_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(jit, "_device_targets", {})
    monkeypatch.setattr(jit, "target", lambda capability: f"sm_{capability}")
    assert [jit.device_target(), jit.device_target()] == ["sm_80"] * 2
    current[0] = 1
    assert [jit.device_target(), jit.device_target()] == ["sm_90"] * 2
    assert asked == [0, 1]


def test_a_kernel_is_taken_from_its_file_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(path: str) -> Any:
        return SimpleNamespace(get_function=lambda entry: (path, entry))

    monkeypatch.setattr(jit, "_cupy", lambda: SimpleNamespace(RawModule=module))
    assert jit._open("here.cubin", "gemm") == ("here.cubin", "gemm")


def test_without_cupy_a_kernel_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def refuse(name: str, *args: Any, **how: Any) -> Any:
        if name == "cupy":
            raise ImportError("there is none")
        return imported(name, *args, **how)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RuntimeError, match=r"CuPy.*there is none"):
        jit._cupy()


class Function:
    argtypes: Any = None
    restype: Any = None


def test_functions_of_the_driver_take_addresses_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, info = Function(), Function()
    library = SimpleNamespace(cuTensorMapEncodeTiled=encode, cuStreamGetCaptureInfo_v2=info)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    tensor_map._driver_function.cache_clear()
    workspace._capture_info.cache_clear()
    try:
        assert tensor_map._driver_function() is encode and workspace._capture_info() is info
    finally:
        tensor_map._driver_function.cache_clear()
        workspace._capture_info.cache_clear()
    pointer, number = ctypes.c_void_p, ctypes.c_int
    # map, type, rank, address; then arrays of ctypes and small numbers, which are passed as they are
    assert encode.argtypes == [pointer, number, ctypes.c_uint32, pointer]
    assert encode.restype is number and info.argtypes == [pointer] * 6


def test_a_capture_has_the_number_that_the_driver_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(stream: int, status: Any, number: Any, *rest: Any) -> int:
        number._obj.value = 100 + stream
        return 0 if stream < 50 else 1

    monkeypatch.setattr(workspace, "_capture_info", lambda: ask)
    assert workspace._capture_number(7) == 107
    others = [workspace._capture_number(60), workspace._capture_number(60)]
    assert len(set(others)) == 2 and max(others) < 0  # nobody knows: a number of its own each time
    monkeypatch.setattr(workspace, "_capture_info", lambda: None)
    assert workspace._capture_number(7) < 0


def test_counters_of_captures_are_whole_pieces_of_the_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = np.arange(128)
    monkeypatch.setattr(workspace, "_reserves", {0: [zeros, 0]})
    parts = [workspace._reserved(0, count) for count in (1, 32, 33)]
    assert [list(x) for x in parts] == [list(range(32)), list(range(32, 64)), list(range(64, 128))]
    monkeypatch.setattr(workspace, "retain_for_graph", lambda make: make())
    monkeypatch.setattr(workspace, "cupy", np)
    more = workspace._reserved(0, 5)  # the reserve is used up
    assert len(more) == 5 and more.dtype == np.int32 and not more.any()
    assert len(workspace._reserved(1, 40)) == 40  # and another device has none


def test_memory_is_of_the_types_that_kernels_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(ptr=7, is_capturing=lambda: False)
    cuda = SimpleNamespace(get_current_stream=lambda: stream, runtime=SimpleNamespace(getDevice=lambda: 0))
    monkeypatch.setattr(workspace, "cupy", SimpleNamespace(zeros=np.zeros, empty=np.empty, cuda=cuda))
    monkeypatch.setattr(workspace, "_zeroed", {})
    monkeypatch.setattr(workspace, "_reserves", {})
    found = workspace.counters(3)
    assert found.dtype == np.int32 and len(found) == workspace._LEAST_COUNTERS
    assert workspace.counters(workspace._LEAST_COUNTERS) is found
    more = workspace.counters(workspace._LEAST_COUNTERS + 1)
    assert len(more) == workspace._LEAST_COUNTERS + 1 and workspace.counters(1) is more
    reserve, used = workspace._reserves[0]
    assert reserve.dtype == np.int32 and len(reserve) == workspace._RESERVE and used == 0 and not reserve.any()
    assert workspace.temporary(5, np.float64).dtype == np.float64
