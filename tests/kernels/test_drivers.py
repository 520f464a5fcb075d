"""What is asked of CuPy and of the driver, where neither is there."""

from __future__ import annotations

import builtins
import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cupy")

from bsrgemm._kernels import driver, jit


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


def test_functions_of_the_driver_take_addresses_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, move = Function(), Function()
    library = SimpleNamespace(cuTensorMapEncodeTiled=encode, cuTensorMapReplaceAddress=move)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(driver, "_library", driver._library.__wrapped__)
    assert driver.tensor_map_encoder() is encode
    pointer = ctypes.c_void_p
    # map, type, rank, address; then arrays of ctypes and small numbers, which are passed as they are
    assert encode.argtypes == [pointer, ctypes.c_int, ctypes.c_uint32, pointer]
    assert move.argtypes == [pointer, pointer]


class Library:
    """A driver whose streams record a graph, or whose calls fail; it gives a signal when the graph is destroyed."""

    def __init__(self, graph: int | None = 0x5000, status: int = 0) -> None:
        self.graph, self.status = graph, status
        self.owned: dict[int, Any] = {}
        self.moved: list[tuple[Any, ...]] = []

    def cuStreamGetCaptureInfo_v2(self, stream: Any, state: Any, number: Any, graph: Any, *rest: Any) -> int:
        number._obj.value, graph._obj.value = 2**40 + stream.value, self.graph
        assert rest == (None, None)
        return self.status

    def cuStreamGetId(self, stream: Any, number: Any) -> int:
        number._obj.value = 2**41 + stream.value
        return self.status

    def cuUserObjectCreate(self, owned: Any, argument: Any, destroy: Any, count: int, flags: int) -> int:
        owned._obj.value = 0x6000
        self.owned[0x6000] = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destroy.value), argument.value
        assert count == 1 and flags == 1, "one reference; the driver does not wait for the function"
        return self.status

    def cuGraphRetainUserObject(self, graph: Any, owned: Any, count: int, flags: int) -> int:
        self.moved.append((graph.value, owned.value, count, flags))
        return self.status

    def destroy(self) -> None:
        """What the driver does when the graph is gone."""
        destroy, argument = self.owned.pop(0x6000)
        destroy(argument)


def test_a_stream_has_the_number_that_the_driver_gives_it_and_what_it_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_library", Library)
    assert driver.stream_number(2**33) == 2**41 + 2**33
    assert driver.recorded(2**33) == (2**40 + 2**33, 0x5000)
    monkeypatch.setattr(driver, "_library", lambda: Library(graph=None))
    assert driver.recorded(7) == (2**40 + 7, 0)


def test_an_error_of_the_driver_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    class Error(Exception):
        pass

    monkeypatch.setattr(cupy.cuda, "driver", SimpleNamespace(CUDADriverError=Error))
    monkeypatch.setattr(driver, "_library", lambda: Library(status=201))
    for call in (driver.stream_number, driver.recorded, driver.Signal):
        with pytest.raises(Error, match="201"):
            call(1)


def test_a_signal_is_given_when_the_graph_is_destroyed_and_stays_given(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(driver, "_library", lambda: library)
    signal = driver.Signal(0x5000)
    assert library.moved == [(0x5000, 0x6000, 1, 1)], "the graph has the only reference"
    assert not signal.given() and not signal.given()
    library.destroy()
    assert signal.given() and signal.given()
