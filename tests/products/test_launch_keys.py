"""What a launch waits for, which layouts it reads without a copy, and what a result must not overlap."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._backend.base import Blocks
from bsrgemm._kernels.workspace import StreamOrdered
from bsrgemm._products import matrix_cache

from ..emulator.emulator import put
from ..fake_device.driver import driven
from .test_launch import F16, LEAF, CardProducts, Matrix, dense, matrix, started  # noqa: F401


# ------------------------------------------------------------------------------------------------- other streams
class Stream:
    """A stream that notes for which events it waits."""

    def __init__(self) -> None:
        self.waited: list[Any] = []
        self.event = SimpleNamespace(done=False)

    def record(self) -> Any:
        return self.event

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)

    def is_capturing(self) -> bool:
        return False


def test_another_stream_waits_until_what_it_asks_for_is_made() -> None:
    first, second = Stream(), Stream()
    current = [first]
    cuda = SimpleNamespace(get_current_stream=lambda: current[0])
    with driven(SimpleNamespace(cuda=cuda)):
        made = StreamOrdered("a list")
        current[0] = second
        assert made.get() == made.get() == "a list"
        assert second.waited == [first.event, first.event]  # each launch may be on another stream
        first.event.done = True
        assert made.get() == "a list"
        first.event.done = False  # an event that was recorded anew is not this one
        assert made.get() == "a list"
    assert len(second.waited) == 2 and not first.waited


def test_a_list_of_a_matrix_is_waited_for_by_every_launch_until_it_is_made(started) -> None:  # noqa: F811
    """The same lists, asked for from another stream: it waits, whether the list is new or remembered."""
    stream = Stream()
    made_on = matrix_cache.cupy.cuda.get_current_stream()
    event = made_on.record()
    with patch.object(event, "done", False), patch.object(made_on, "wait_event", stream.wait_event, create=True):
        A = matrix()
        bg.matmul(A, dense(), out=dense())
        first = len(stream.waited)
        bg.matmul(A, dense(), out=dense())
        assert 0 < first < len(stream.waited)
        assert all(x is event for x in stream.waited)


# ----------------------------------------------------------------------------------------------------- overlaps
@pytest.mark.parametrize("name", ["data", "indices", "indptr"])
@pytest.mark.parametrize("end", ["first", "last"])
def test_out_must_not_lie_over_an_array_of_the_matrix(name: str, end: str, started) -> None:  # noqa: F811
    """One byte is enough."""
    M = Matrix()
    room = put(np.zeros(1 << 17, np.uint8))
    array = getattr(M, name)
    size = 128 * 64 * F16.itemsize
    there = room[1 << 16 : (1 << 16) + array.nbytes]
    start = (1 << 16) - size + 2 if end == "first" else (1 << 16) + array.nbytes - 2
    there[...] = array.reshape(-1).view(np.uint8)
    blocks = {"data": M.data, "indices": M.indices, "indptr": M.indptr}
    blocks[name] = there.view(array.dtype).reshape(array.shape)
    A = object.__new__(LEAF)._set(Blocks(**blocks), M._shape, canonical=True)
    out = room[start : start + size].view(F16).reshape(128, 64)
    with pytest.raises(ValueError, match=rf"out: overlaps A\.{name}"):
        bg.matmul(A, dense(), out=out)
    shift = -2 if end == "first" else 2
    bg.matmul(A, dense(), out=room[start + shift : start + shift + size].view(F16).reshape(128, 64))
    assert len(started) == 1


# ------------------------------------------------------------------------------------------------------ layouts
def lying(row: int, col: int, rows: int = 128, cols: int = 64) -> Any:
    """An array with these strides in bytes; its values are never read."""
    return np.lib.stride_tricks.as_strided(dense(8), (rows, cols), (row, col), subok=True)


#: Strides of a right-hand side of 128 x 64 in float16, and whether the copy engine can read it.
LAYOUTS = {
    "rows": (128, 2, True),
    "columns": (2, 256, True),
    "rows far apart": (2**32 - 16, 2, True),
    "columns far apart": (2, 2**32 - 16, True),
    "rows too far apart": (2**32, 2, False),
    "columns too far apart": (2, 2**32, False),
    "rows over each other": (112, 2, False),
    "columns over each other": (2, 240, False),
    "rows at odd places": (136, 2, False),
    "columns at odd places": (2, 264, False),
    "rows backwards": (-128, 2, False),
    "gaps": (256, 4, False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_copy_engine_reads_what_it_can(layout: str, started) -> None:  # noqa: F811
    row, col, readable = LAYOUTS[layout]
    A = matrix()
    with (
        patch("bsrgemm._products.copies.wants_aligned_rows", lambda problem: False),
        patch.object(CardProducts, "overlapping", lambda *operands: None),  # what is far apart is not there
    ):
        bg.matmul(A, lying(row, col), out=put(np.zeros((128, 64), F16)))
    ((name, *_),) = started
    assert ("gemm_sm90" in name) == readable
