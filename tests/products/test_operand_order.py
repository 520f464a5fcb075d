"""Which dense operands the copy engine can read as they lie, in every condition at its edge."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bsrgemm._products.call import order_of

#: (shape, strides, order); elements of 2 bytes, or as the fourth entry says, and an address after that
CASES: list[tuple[tuple[int, ...], tuple[int, ...], str, int, int]] = [
    ((128, 64), (128, 2), "C", 2, 0),
    ((128, 64), (2, 256), "F", 2, 0),
    ((128, 64), (128, 2), "", 2, 8),
    ((128, 64), (128, 2), "C", 2, 16),
    ((128, 64), (144, 2), "C", 2, 0),
    ((128, 64), (136, 2), "", 2, 0),
    ((128, 64), (112, 2), "", 2, 0),
    ((128, 64), (2**32 - 16, 2), "C", 2, 0),
    ((128, 64), (2**32, 2), "", 2, 0),
    ((128, 64), (2, 2**32 - 16), "F", 2, 0),
    ((128, 64), (2, 2**32), "", 2, 0),
    ((128, 64), (2, 240), "", 2, 0),
    ((128, 64), (2, 264), "", 2, 0),
    ((128, 64), (256, 4), "", 2, 0),
    ((128, 1), (2, 2), "F", 2, 0),
    ((128, 1), (2, 7), "F", 2, 0),
    ((128, 1), (16, 2), "C", 2, 0),
    ((128, 1), (4, 4), "", 2, 0),
    ((128, 2), (2, 7), "", 2, 0),
    ((1, 64), (2, 2), "", 2, 0),
    ((1, 64), (128, 2), "C", 2, 0),
    ((16, 16), (128, 8), "C", 8, 0),
    ((16, 16), (8, 128), "F", 8, 0),
    ((3, 128, 64), (2**14, 128, 2), "C", 2, 0),
    ((3, 128, 64), (2**40 - 16, 128, 2), "C", 2, 0),
    ((3, 128, 64), (2**40, 128, 2), "", 2, 0),
    ((3, 128, 64), (0, 128, 2), "", 2, 0),
    ((3, 128, 64), (16, 128, 2), "C", 2, 0),
    ((3, 128, 64), (-(2**14), 128, 2), "", 2, 0),
    ((3, 128, 64), (2**14 + 8, 128, 2), "", 2, 0),
    ((1, 128, 64), (0, 128, 2), "C", 2, 0),
    ((1, 128, 64), (2**40, 128, 2), "C", 2, 0),
    ((2, 128, 64), (2**40, 128, 2), "", 2, 0),
    ((1, 128, 64), (2**14 + 8, 128, 2), "", 2, 0),
]


@pytest.mark.parametrize("shape, strides, order, size, address", CASES)
def test_an_operand_is_read_along_rows_or_columns(
    shape: tuple[int, ...], strides: tuple[int, ...], order: str, size: int, address: int
) -> None:
    x = SimpleNamespace(shape=shape, strides=strides, itemsize=size, data=SimpleNamespace(ptr=4096 + address))
    assert order_of(x) == order
