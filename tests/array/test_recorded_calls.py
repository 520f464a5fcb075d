"""What public calls tell the graph that is captured: all arrays that they work with, until they return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._attention import checks
from bsrgemm._backend.recording import arrays_of
from bsrgemm._backend.registry import by_name

from .. import fake_cupy

pytestmark = pytest.mark.fake


class Noting:
    """What a backend whose work is always recorded keeps, and how many calls keep it still."""

    def __init__(self, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrays: list[Any] = []
        self.within = 0

        @contextmanager
        def recording(*operands: Any) -> Iterator[None]:
            self.arrays += arrays_of(backend, operands)
            self.within += 1
            yield
            self.within -= 1

        monkeypatch.setattr(backend, "is_recording", lambda: True)
        monkeypatch.setattr(backend, "recording", recording)


def are(found: Any, *wanted: Any) -> bool:
    """Whether these are the same arrays, each once."""
    return sorted(map(id, found)) == sorted(map(id, wanted))


def test_arrays_are_found_wherever_an_object_has_them() -> None:
    A, x = bg.bsr_array(np.eye(4), blocksize=(2, 2)).to_device("cuda"), fake_cupy.xp.asarray(np.ones(4))
    held: dict[str, Any] = {"again": x, "matrices": [A, (A,)], "number": 1, "type": bg.bsr_array, "host": np.ones(3)}
    held["itself"] = held
    found = list(arrays_of(by_name("cuda"), held))
    assert len({id(y) for y in found}) == len(found) and all(isinstance(y, fake_cupy.ndarray) for y in found)
    for y in (x, A.data, A.indices, A.indptr):
        assert any(np.shares_memory(y._memory, z._memory) for z in found)


@pytest.mark.parametrize("call", [lambda A: A.toarray(), lambda A: A * 2, abs, lambda A: A.sum(axis=1)])
def test_methods_keep_the_arrays_of_their_matrix_until_they_return(
    call: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    A = bg.bsr_array((np.ones((2, 2, 2)), [0, 1], [0, 1, 2]), shape=(4, 4)).to_device("cuda").sorted_indices()
    noted = Noting(fake_cupy.backend(), monkeypatch)
    call(A)
    assert not noted.within and any(x is A.data for x in noted.arrays)


def test_numbers_that_attention_converts_are_kept_as_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversion is a part of the graph, which reads them each time."""
    backend, xp = fake_cupy.backend(), fake_cupy.xp
    noted = Noting(backend, monkeypatch)
    lengths, scales = xp.asarray(np.array([0, 3, 5])), xp.asarray(np.ones(4, np.float32))
    assert checks._bounds(backend, lengths, "cu_seqlens_q", 5, "q").dtype == np.int32
    assert are(noted.arrays, lengths)
    checks.head_scales(backend, scales, "q_scale", 2, 4)
    assert are(noted.arrays, lengths, scales)
