"""Launches that may overlap: whose they are, and what the driver is given. The kernels run in tests/gpu."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import cupy

import bsrgemm as bg
from bsrgemm._attention.decode_kernel import Decode, KvAppend
from bsrgemm._kernels import driver as library_driver
from bsrgemm._kernels import jit, overlapping
from bsrgemm._kernels.element_types import Types
from bsrgemm._kernels.jit import cuda_root, gather
from bsrgemm._products.gemm_simt import GemmFew


class Driver:
    """cuLaunchKernelEx that takes down what it was given, and returns a status."""

    def __init__(self) -> None:
        self.status = 0
        self.launches: list[Any] = []

    def __call__(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        config = config._obj
        attribute = overlapping._Attribute.from_address(config.attributes)
        numbers = [ctypes.c_int64.from_address(address).value for address in parameters]
        shape = (*config.grid, *config.block, config.shared_bytes, config.stream)
        self.launches.append((function.value, shape, config.attribute_count, attribute.id, attribute.value, numbers))
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(library_driver, "_library", lambda: SimpleNamespace(cuLaunchKernelEx=found))
    stream = SimpleNamespace(ptr=77)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: stream)
    return found


def kernel(**attributes: Any) -> overlapping.OverlappingKernel:
    return overlapping.OverlappingKernel(SimpleNamespace(kernel=SimpleNamespace(ptr=1234), **attributes))


def test_the_context_is_one_of_its_thread_and_ends() -> None:
    seen = []
    assert not overlapping.thread.active
    with bg.overlapping():
        other = threading.Thread(target=lambda: seen.append(overlapping.thread.active))
        other.start()
        other.join()
        with bg.overlapping():
            assert overlapping.thread.active
        assert overlapping.thread.active
    with pytest.raises(KeyError), bg.overlapping():
        raise KeyError
    assert seen == [False] and not overlapping.thread.active


def test_the_driver_gets_the_shape_the_stream_the_arguments_and_the_attribute(driver: Driver) -> None:
    launch = kernel()
    packed = jit.argument(bytearray(np.array([5, 6], np.int64)))
    launch((3,), (128,), (packed, np.int64(-9)), shared_mem=512)
    launch((3, 4), (32, 2, 1), (np.int64(8),))
    launch((np.int32(3),), (128,), (packed, np.int64(7)), shared_mem=512)
    first = (1234, (3, 1, 1, 128, 1, 1, 512, 77), 1, 6, 1)
    assert driver.launches == [
        (*first, [5, -9]),
        (1234, (3, 4, 1, 32, 2, 1, 0, 77), 1, 6, 1, [8]),
        (*first, [5, 7]),
    ]
    assert len(launch.launches) == 2


def test_an_array_of_the_device_is_given_by_its_address(driver: Driver) -> None:
    array = SimpleNamespace(data=SimpleNamespace(ptr=1 << 40))
    kernel()((1,), (1,), (array,))
    assert driver.launches[0][-1] == [1 << 40]


def test_shapes_are_kept_up_to_a_number(driver: Driver) -> None:
    launch = kernel()
    for n in range(3 * overlapping._MOST_SHAPES):
        launch((n + 1,), (32,), ())
        assert len(launch.launches) <= overlapping._MOST_SHAPES
    assert [shape[0] for _, shape, *_ in driver.launches] == list(range(1, 3 * overlapping._MOST_SHAPES + 1))


def test_an_error_of_the_driver_is_raised(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy.cuda.driver, "CUDADriverError", type("Told", (RuntimeError,), {}))
    driver.status = 719
    with pytest.raises(RuntimeError, match="719"):
        kernel()((1,), (1,), ())


def test_everything_else_is_that_of_the_kernel() -> None:
    launch = kernel(max_dynamic_shared_size_bytes=0, name="gemm_few")
    launch.max_dynamic_shared_size_bytes = 99
    assert launch.kernel.max_dynamic_shared_size_bytes == 99 and launch.name == "gemm_few"


@pytest.mark.parametrize(("arch", "can"), [("sm_75", False), ("sm_89", False), ("sm_90a", True), ("sm_120", True)])
def test_cards_since_hopper_can_overlap(arch: str, can: bool) -> None:
    assert overlapping.can_overlap(arch) == can


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("ahead", [False, True])
def test_the_loader_returns_what_overlaps(arch: str, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_build_and_open", lambda *_: SimpleNamespace())
    monkeypatch.setattr(jit, "_current_device", lambda: 0)
    monkeypatch.setattr(jit, "_kernels", {})
    spec = GemmFew(Types("f16", "f16", "f16", "f32", "i32"), True, read_ahead=ahead).spec()
    assert spec.overlaps == ahead and replace(spec, overlaps=not ahead) != spec
    found = jit.load(spec, arch)
    assert isinstance(found, overlapping.OverlappingKernel) == (ahead and arch == "sm_90a")


def _ptx(spec: jit.KernelSpec, arch: str) -> str:
    nvrtc, texts = jit._nvrtc(), gather(spec.source, cuda_root())
    headers = [name for name in texts if name != spec.source]
    program = nvrtc.createProgram(
        texts[spec.source], spec.source, [texts[name].encode() for name in headers], [name.encode() for name in headers]
    )
    nvrtc.compileProgram(program, jit.options(spec, arch))
    found = nvrtc.getPTX(program)
    nvrtc.destroyProgram(program)
    return str(found if isinstance(found, str) else found.decode())


@pytest.mark.parametrize(
    "config",
    [
        GemmFew(Types("f16", "f16", "f16", "f32", "i32"), True, 8, True),
        GemmFew(Types("bf16", "bf16", "f32", "f32", "i64"), False, 4, True),
        Decode("f16", 128, 128, 16),
        KvAppend("bf16"),
    ],
    ids=str,
)
def test_kernels_that_overlap_wait_and_read_nothing_past_that_order(config: Any) -> None:
    """Only ordinary loads see what kernels wrote that this one has waited for; ld.global.nc need not."""
    code = _ptx(config.spec(), "sm_90a")
    assert "griddepcontrol.wait;" in code and "griddepcontrol.launch_dependents;" in code
    assert "ld.global" in code and "ld.global.nc" not in code
    assert "griddepcontrol" not in _ptx(config.spec(), "sm_80")
