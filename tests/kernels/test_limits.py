"""Limits and sizes of cards, tensor maps, counters and names, each from both sides."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm._kernels import disk_cache, driver, element_types, graphs, jit, tensor_map, workspace
from bsrgemm._kernels.card import shared_kb, tensor_arch
from bsrgemm._kernels.workspace import StreamOrdered

from .stub_driver import driven


# ------------------------------------------------------------------------------------------------- architectures
@pytest.mark.parametrize(
    "arch, tensor, shared",
    [
        *[("sm_75", False, 99), ("sm_79", False, 99), ("sm_80", True, 163), ("sm_81", True, 99), ("sm_86", True, 99)],
        *[("sm_87", True, 163), ("sm_88", True, 99), ("sm_89", True, 99), ("sm_90", True, 227), ("sm_90a", True, 227)],
        *[("sm_100", True, 227), ("sm_119", True, 227), ("sm_120", True, 99), ("sm_121", True, 99)],
    ],
)
def test_what_an_architecture_offers(arch: str, tensor: bool, shared: int) -> None:
    assert tensor_arch(arch) is tensor and shared_kb(arch) == shared


@pytest.mark.parametrize("integrated", [87, 101, 110])
def test_integrated_chips_and_cards_do_not_run_each_others_binaries(integrated: int) -> None:
    decade = integrated // 10 * 10
    for older in range(decade, integrated):
        with pytest.raises(RuntimeError, match="NVRTC installed compiles for"):
            jit.target(integrated, [older])
    for newer in range(integrated + 1, decade + 10):
        with pytest.raises(RuntimeError, match="NVRTC installed compiles for"):
            jit.target(newer, [integrated])
    assert jit.target(integrated, [integrated]) == f"sm_{integrated}"


def test_a_card_does_not_run_what_was_compiled_for_the_integrated_chip_of_its_generation() -> None:
    with pytest.raises(RuntimeError, match="NVRTC installed compiles for"):
        jit.target(75, [72])
    assert jit.target(88, [80, 87]) == "sm_80" and jit.target(88, [80, 86, 87]) == "sm_86"


# ------------------------------------------------------------------------------------------------- tensor maps
@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A driver that takes every map."""
    seen: list[Any] = []
    library = SimpleNamespace(cuTensorMapEncodeTiled=lambda *args: seen.append(args) or 0)
    monkeypatch.setattr(driver, "_library", lambda: library)
    return seen


SIZES = {"uint8": 1, "int32": 4, "float16": 2, "float32": 4, "float64": 8, "bfloat16": 2}


@pytest.mark.parametrize("dtype", tensor_map.DTYPES)
@pytest.mark.parametrize("width", [32, 64, 128])
def test_a_row_of_a_tile_is_as_wide_as_its_swizzle_at_most(dtype: str, width: int, calls: list[Any]) -> None:
    size = SIZES[dtype]
    tensor_map.Layout(dtype, (512, 8), (4096,), (width // size, 8), f"{width}B").at(64)
    with pytest.raises(ValueError, match=f"take {width + 16} bytes of {dtype}, expected at most {width} with"):
        tensor_map.Layout(dtype, (512, 8), (4096,), ((width + 16) // size, 8), f"{width}B")
    for wrong in range(1, 16 // size):
        with pytest.raises(ValueError, match=f"take {width - wrong * size} bytes of {dtype}, expected a multiple of"):
            tensor_map.Layout(dtype, (512, 8), (4096,), (width // size - wrong, 8), f"{width}B")
    assert len(calls) == 1


def test_the_largest_tensors_and_tiles_are_taken(calls: list[Any]) -> None:
    tensor_map.Layout("uint8", (2**32, 2**32, 1), (2**40 - 16, 16), (256, 256, 1), "none").at(16)
    assert len(calls) == 1


@pytest.mark.parametrize("wrong", [0, -16, 8, 17, 31, 2**40, 2**40 + 16])
@pytest.mark.parametrize("place", [0, 1])
def test_every_stride_is_checked(wrong: int, place: int, calls: list[Any]) -> None:
    strides = [256, 4096]
    tensor_map.Layout("uint8", (64, 8, 2), tuple(strides), (64, 8, 2), "none").at(64)
    strides[place] = wrong
    with pytest.raises(ValueError, match=r"strides_bytes=.*expected positive multiples of 16 below 2\*\*40"):
        tensor_map.Layout("uint8", (64, 8, 2), tuple(strides), (64, 8, 2), "none").at(64)


@pytest.mark.parametrize("wrong", [-16, 1, 8, 15, 17, 24])
def test_every_address_is_checked(wrong: int, calls: list[Any]) -> None:
    for right in (16, 32, 240, 272):
        tensor_map.Layout("uint8", (64,), (), (64,), "none").at(right)
    with pytest.raises(ValueError, match="expected a device address that is a multiple of 16"):
        tensor_map.Layout("uint8", (64,), (), (64,), "none").at(wrong)


# ------------------------------------------------------------------------------------------------- streams
class Stream:
    def __init__(self, ptr: int) -> None:
        self.ptr, self.capturing = ptr, False
        self.waited: list[Any] = []

    def is_capturing(self) -> bool:
        return self.capturing

    def record(self) -> Any:
        return SimpleNamespace(done=False, by=self)

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)


@pytest.fixture
def card() -> Iterator[Any]:
    found = SimpleNamespace(stream=Stream(7), device=0)
    found.cuda = SimpleNamespace(
        get_current_stream=lambda: found.stream, runtime=SimpleNamespace(getDevice=lambda: found.device)
    )
    found.zeros = np.zeros
    with driven(found):
        yield found


def test_a_stream_waits_for_a_value_until_it_is_complete(card: Any) -> None:
    made = StreamOrdered("value")
    card.stream = other = Stream(8)
    assert made.get() == "value" and made.get() == "value"
    assert len(other.waited) == 2 and other.waited[0].by.ptr == 7
    other.waited[0].done = True
    assert made.get() == "value" and made._event is None
    assert made.get() == "value" and len(other.waited) == 2


def test_the_host_waits_once_for_a_value_that_a_captured_stream_needs(card: Any) -> None:
    made, waited = StreamOrdered("value"), []
    made._event.synchronize = lambda: waited.append(8)
    card.stream = other = Stream(8)
    other.capturing = True
    assert made.get() == "value" and made.get() == "value"
    assert waited == [8] and made._event is None and not other.waited


def test_another_thread_may_find_a_value_complete_meanwhile(card: Any) -> None:
    made = StreamOrdered("value")

    class Event:
        @property
        def done(self) -> bool:
            made._event = None  # what the other thread does
            return False

    event = made._event = Event()  # type: ignore[assignment]
    assert made.get() == "value"
    assert card.stream.waited == [event]


def test_a_stream_has_1024_counters_at_least_and_as_many_as_it_asks_for(card: Any) -> None:
    for count, want in ((1, 1024), (1024, 1024), (1025, 1025), (5, 1025)):
        found = workspace.counters(count)
        assert len(found) == want and found.dtype == np.int32 and not found.any()
        assert workspace.counters(want) is found
    reserve = graphs._reserves[0]._zeros
    assert len(reserve) == 1 << 18 and reserve.dtype == np.int32 and not reserve.any()


def test_the_devices_of_a_stream_share_no_counters(card: Any) -> None:
    first = workspace.counters(1)
    card.device = 1
    assert workspace.counters(1) is not first and set(graphs._reserves) == {0, 1}


def test_captures_take_the_reserve_to_its_end_in_pieces_of_32(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_RESERVE", 128)
    reserve = graphs.Reserve()
    found = [reserve.take(count) for count in (33, 64)]
    assert [len(x) for x in found] == [64, 64] and not np.shares_memory(*found)
    assert all(np.shares_memory(x, reserve._zeros) for x in found)
    assert reserve.take(1) is None
    reserve.free.append(found[0])
    assert reserve.take(65) is None and reserve.take(64) is found[0] and reserve.take(1) is None


# ------------------------------------------------------------------------------------------------- files
def test_entries_are_named_by_32_digits() -> None:
    name = disk_cache.entry_path(Path("/x"), "gemm-sm_90a", b"contents").name
    stem, _, rest = name.rpartition("-")
    assert stem == "gemm-sm_90a" and len(rest.removesuffix(".cubin")) == disk_cache.DIGITS == 32


def test_sources_are_read_as_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_bytes("// é\nint x;".encode())
    with patch.object(Path, "read_text", autospec=True, side_effect=Path.read_text) as read:
        assert jit.gather("a.cu", tmp_path) == {"a.cu": "// é\nint x;"}
    assert read.call_args.kwargs == {"encoding": "utf-8"}


def test_the_folder_of_the_cache_is_for_its_user_alone(tmp_path: Path) -> None:
    where, before = tmp_path / "a" / "b", os.umask(0)
    try:
        disk_cache.write(where, "x", b"1")
        disk_cache.write(where, "y", b"2")
    finally:
        os.umask(before)
    assert stat.S_IMODE(where.stat().st_mode) == 0o700
    assert disk_cache.read(where, "x") == b"1" and disk_cache.read(where, "y") == b"2"


def test_a_file_that_was_not_finished_is_abandoned_after_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(disk_cache, "time", SimpleNamespace(time=lambda: 10_000.0))
    for name, changed in (
        (".old.tmp", 6399),
        (".hour.tmp", 6400),
        (".new.tmp", 9999),
        (".old.cubin", 1),
        ("old.tmp", 1),
    ):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (changed, changed))
    disk_cache.write(tmp_path, "entry", b"1")
    assert sorted(os.listdir(tmp_path)) == [".hour.tmp", ".new.tmp", ".old.cubin", "entry", "old.tmp"]


# ------------------------------------------------------------------------------------------------- names and numbers
def test_a_grid_has_as_many_thread_blocks_as_cuda_allows() -> None:
    assert (jit.MAX_GRID_X, jit.MAX_GRID_YZ) == (2_147_483_647, 65_535)


def test_elements_have_the_sizes_of_their_types() -> None:
    one, two, four, eight = "boolean i8 u8 e4m3", "i16 u16 f16 bf16", "i32 u32 f32", "i64 u64 f64 c64"
    want = {name: size for size, names in ((1, one), (2, two), (4, four), (8, eight)) for name in names.split()}
    assert want | {"c128": 16} == element_types.BYTES


@pytest.mark.parametrize("other", range(4))
def test_a_product_is_of_one_type_if_all_four_are(other: int) -> None:
    names = ["f32"] * 4
    assert element_types.Types(*names).of_one("f32") and not element_types.Types(*names).of_one("f64")
    names[other] = "f64"
    assert not element_types.Types(*names).of_one("f32") and not element_types.Types(*names).of_one("f64")


def test_a_refusal_lists_the_architectures_that_have_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "supported_archs", lambda: (70, 75, 80, 90))
    with pytest.raises(ValueError, match="got 'sm_x', wanted one of sm_75, sm_80, sm_90, or one of these with an a"):
        jit.check_arch("sm_x")
    with pytest.raises(ValueError, match="got 'sm_70', wanted sm_75 or newer"):
        jit.check_arch("sm_70")
    for arch in ("sm_75", "sm_90", "sm_90a"):
        jit.check_arch(arch)
