"""Tensor maps: arguments are checked before the driver sees them, and reach it as it wants them."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from bsrgemm._kernels import driver, tensor_map

GOOD: dict[str, Any] = {
    "pointer": 0x7F0000000010,
    "dtype_name": "float16",
    "dims": (200, 100),
    "strides_bytes": (512,),
    "box": (64, 32),
    "swizzle": "128B",
    "l2": "256B",
}


def made(pointer: int, *layout: Any, **more: Any) -> bytes:
    """The map of a tensor at an address."""
    return tensor_map.Layout(*layout, **more).at(pointer)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A driver that writes down its arguments and fills the map with ones."""
    seen: list[tuple[Any, ...]] = []

    def encode(address: int, *args: Any) -> int:
        seen.append((address, *(tuple(a) if isinstance(a, ctypes.Array) else a for a in args)))
        ctypes.memset(address, 1, 128)
        return 0

    monkeypatch.setattr(driver, "_library", lambda: SimpleNamespace(cuTensorMapEncodeTiled=encode))
    return seen


def test_the_driver_gets_the_arguments_in_its_own_numbers(calls) -> None:
    made(**GOOD)
    address, dtype, rank, pointer, dims, strides, box, steps, interleave, swizzle, l2, fill = calls[0]
    assert address % 64 == 0
    assert (dtype, rank, pointer) == (6, 2, GOOD["pointer"])
    assert (dims, strides[:1], box, steps) == ((200, 100), (512,), (64, 32), (1, 1))
    assert (interleave, swizzle, l2, fill) == (0, 3, 3, 0)


@pytest.mark.parametrize(
    ("dtype_name", "number"),
    [("uint8", 0), ("int32", 3), ("float16", 6), ("float32", 7), ("float64", 8), ("bfloat16", 9)],
)
def test_dtypes_have_the_drivers_numbers(calls, dtype_name: str, number: int) -> None:
    made(**GOOD | {"dtype_name": dtype_name, "box": (16, 1)})
    assert calls[0][1] == number


@pytest.mark.parametrize(("swizzle", "number"), [("none", 0), ("32B", 1), ("64B", 2), ("128B", 3)])
def test_swizzles_have_the_drivers_numbers(calls, swizzle: str, number: int) -> None:
    made(**GOOD | {"swizzle": swizzle, "box": (16, 1)})
    assert calls[0][9] == number


@pytest.mark.parametrize(("l2", "number"), [("none", 0), ("64B", 1), ("128B", 2), ("256B", 3)])
def test_l2_promotions_have_the_drivers_numbers(calls, l2: str, number: int) -> None:
    made(**GOOD | {"l2": l2})
    assert calls[0][10] == number


def test_a_layout_is_checked_and_converted_once_for_all_addresses(calls, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: x for name, x in GOOD.items() if name != "pointer"}
    layout = tensor_map.Layout(**given)
    monkeypatch.setattr(tensor_map, "_driver_arguments", None)
    memory, address = tensor_map.aligned_memory(256)
    assert address % 64 == 0 and layout.at(64) == b"\1" * 128
    memory[:] = bytes(256)
    layout.write(address + 128, 128)
    assert memory.tobytes() == bytes(128) + b"\1" * 128
    assert [(call[0] - address, call[3]) for call in calls[1:]] == [(128, 128)] and calls[0][3] == 64
    assert calls[0][4:] == calls[1][4:]
    for pointer in (0, 24, -16):
        with pytest.raises(ValueError, match="multiple of 16"):
            layout.write(address, pointer)


def test_one_and_five_dimensions_are_taken(calls) -> None:
    made(64, "float32", (100,), (), (256,), "none")
    made(64, "float32", (4,) * 5, (16, 64, 256, 1024), (4,) * 5, "none")
    assert [call[2] for call in calls] == [1, 5]


def test_a_later_stride_may_be_the_smaller_one(calls) -> None:
    made(64, "float16", (64, 512, 4), (512, 128), (64, 64, 4), swizzle="128B")
    assert calls[0][5][:2] == (512, 128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype_name": "complex64"}, r"dtype_name='complex64': expected one of 'uint8'"),
        ({"swizzle": "256B"}, r"swizzle='256B': expected one of 'none', '32B'"),
        ({"l2": "32B"}, r"l2='32B': expected one of 'none', '64B'"),
        ({"pointer": 0}, r"pointer=0x0: expected .* multiple of 16"),
        ({"pointer": 24}, r"pointer=0x18: expected .* multiple of 16"),
        ({"dims": (), "strides_bytes": (), "box": ()}, r"dims=\(\): expected 1 to 5"),
        ({"dims": (1,) * 6, "strides_bytes": (16,) * 5, "box": (1,) * 6}, r"dims=.*: expected 1 to 5"),
        ({"dims": (200, 0)}, r"dims=\(200, 0\): expected 1 to 2\*\*32"),
        ({"dims": (200, 2**32 + 1)}, r"dims=.*: expected 1 to 2\*\*32"),
        ({"strides_bytes": (512, 512)}, r"strides_bytes=\(512, 512\): expected 1, one per dimension"),
        ({"strides_bytes": (400 + 8,)}, r"strides_bytes=\(408,\): .* multiples of 16"),
        ({"strides_bytes": (0,)}, r"strides_bytes=\(0,\): expected positive"),
        ({"strides_bytes": (2**40,)}, r"strides_bytes=.* below 2\*\*40"),
        ({"box": (64,)}, r"box=\(64,\): expected 2 extents"),
        ({"box": (64, 257)}, r"box=\(64, 257\): expected extents of 1 to 256"),
        ({"box": (64, 0)}, r"box=\(64, 0\): expected extents of 1 to 256"),
        ({"box": (12, 8)}, r"box=\(12, 8\): its rows take 24 bytes of float16, expected a multiple of 16"),
        ({"box": (72, 8)}, r"its rows take 144 bytes of float16, expected at most 128 with swizzle='128B'"),
        ({"box": (40, 8), "swizzle": "64B"}, r"80 bytes of float16, expected at most 64"),
        ({"box": (32, 8), "swizzle": "32B"}, r"64 bytes of float16, expected at most 32"),
    ],
)
def test_a_bad_argument_is_named_with_its_value_and_the_expectation(calls, change, message) -> None:
    with pytest.raises(ValueError, match=message):
        made(**GOOD | change)
    assert calls == []


def test_a_refusal_of_the_driver_shows_code_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_library", lambda: SimpleNamespace(cuTensorMapEncodeTiled=lambda *args: 801))
    with pytest.raises(RuntimeError) as caught:
        made(**GOOD)
    for part in ("CUDA error 801", "dims=(200, 100)", "box=(64, 32)", "swizzle='128B'", "9.0 or newer"):
        assert part in str(caught.value)


@pytest.mark.parametrize("missing", ["driver", "symbol"])
def test_a_missing_or_old_driver_is_told_in_words(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> object:
        assert name == "libcuda.so.1"
        if missing == "driver":
            raise OSError("libcuda.so.1: cannot open shared object file")
        return object()

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(driver, "_library", driver._library.__wrapped__)
    with pytest.raises(RuntimeError, match="need a CUDA 12 driver"):
        made(**GOOD)
