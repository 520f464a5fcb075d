"""What public calls tell the graph that is captured: all arrays that they work with, until they return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._array.arrays import leaf
from bsrgemm._attention import checks
from bsrgemm._backend.recording import arrays_of
from bsrgemm._backend.registry import by_name

from .. import fake_device

fake_device.install()


class Recording(fake_device.FakeBackend):
    """A fake device whose work is always recorded; it notes what is kept, and for how long."""

    records = True

    def __init__(self) -> None:
        self.noted: list[Any] = []
        self.within = 0

    def is_recording(self) -> bool:
        return True

    @contextmanager
    def recording(self, *operands: Any) -> Iterator[None]:
        self.noted += arrays_of(self, operands)
        self.within += 1
        yield
        self.within -= 1


def on(backend: Recording) -> Any:
    A = bg.bsr_array((np.ones((2, 2, 2)), [0, 1], [0, 1, 2]), shape=(4, 4)).to_device("fake")
    return object.__new__(leaf(backend, True))._set(A._blocks, A.shape, canonical=True)


def are(found: Any, *wanted: Any) -> bool:
    """Whether these are the same arrays, each once."""
    return sorted(map(id, found)) == sorted(map(id, wanted))


def test_arrays_are_found_wherever_an_object_has_them() -> None:
    A, x = bg.bsr_array(np.eye(4), blocksize=(2, 2)).to_device("fake"), fake_device.xp.asarray(np.ones(4))
    held: dict[str, Any] = {"again": x, "matrices": [A, (A,)], "number": 1, "type": bg.bsr_array, "host": np.ones(3)}
    held["itself"] = held
    found = list(arrays_of(by_name("fake"), held))
    assert len({id(y) for y in found}) == len(found) and all(isinstance(y, fake_device.ndarray) for y in found)
    for y in (x, A.data, A.indices, A.indptr):
        assert any(np.shares_memory(y._memory, z._memory) for z in found)


@pytest.mark.parametrize("call", [lambda A: A.toarray(), lambda A: A * 2, abs, lambda A: A.sum(axis=1)])
def test_methods_keep_the_arrays_of_their_matrix_until_they_return(
    call: Callable[[Any], Any],
) -> None:
    backend = Recording()
    A = on(backend)
    call(A)
    assert not backend.within and any(x is A.data for x in backend.noted)


def test_numbers_that_attention_converts_are_kept_as_they_were_given() -> None:
    """The conversion is a part of the graph, which reads them each time."""
    backend, xp = Recording(), fake_device.xp
    lengths, scales = xp.asarray(np.array([0, 3, 5])), xp.asarray(np.ones(4, np.float32))
    assert checks._bounds(backend, lengths, "cu_seqlens_q", 5, "q").dtype == np.int32
    assert are(backend.noted, lengths)
    checks.head_scales(backend, scales, "q_scale", 2, 4)
    assert are(backend.noted, lengths, scales)
