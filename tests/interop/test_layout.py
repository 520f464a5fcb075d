"""How panels are described in messages."""

from __future__ import annotations

import pytest

pytest.importorskip("dask")

from bsrgemm.interop.dask import layout


@pytest.mark.parametrize(
    ("sides", "text"),
    [
        ((16,), "(16,)"),
        ((1, 2, 3, 4, 5, 6), "(1, 2, 3, 4, 5, 6)"),
        ((1, 2, 3, 4, 5, 6, 7), "(1, 2, 3, 4, ... 7 in all)"),
    ],
)
def test_the_middle_of_many_panels_is_left_out(sides: tuple[int, ...], text: str) -> None:
    assert layout.shortened(sides) == text
