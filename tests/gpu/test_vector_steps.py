"""What solvers do with vectors in one launch: the numbers of NumPy, in place, and zeros where they divide by 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bsrgemm._backend.registry import by_name

pytestmark = pytest.mark.gpu

#: Shapes of vectors, and of a factor for each of their columns or systems.
SHAPES = [((1_001,), ()), ((501, 3), (3,)), ((4, 250), (4, 1)), ((0,), ()), ((1, 1), (1,))]


def numbers(shape: tuple[int, ...], dtype: str) -> Any:
    rng = np.random.default_rng(len(shape))
    found = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else 0)
    return np.asarray(found, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize(("shape", "factors"), SHAPES, ids=str)
def test_multiples_of_vectors_are_added_in_place(shape: tuple[int, ...], factors: tuple[int, ...], dtype: str) -> None:
    card = by_name("cuda")
    x, y, factor = numbers(shape, dtype), numbers(shape, dtype)[::-1].copy(), numbers(factors, dtype)
    scale = np.finfo(dtype).eps * 8
    for name, wanted in (
        ("add_multiple", y + factor * x),
        ("subtract_multiple", y - factor * x),
        ("multiply_and_add", factor * y + x),
    ):
        there, work = (card.from_host(a.copy()) for a in (y, x))
        operands = [there, card.from_host(factor), card.from_host(x)] + [work] * (name != "multiply_and_add")
        getattr(card, name)(*operands)
        np.testing.assert_allclose(card.to_host(there), wanted, rtol=scale, atol=scale)
        assert there.dtype == np.dtype(dtype)


def test_vectors_of_a_narrower_dtype_are_widened() -> None:
    card = by_name("cuda")
    x, y = numbers((100,), "float32"), numbers((100,), "complex128")
    there = card.from_host(y.copy())
    card.add_multiple(there, card.from_host(np.array(1.5)), card.from_host(x), there)
    np.testing.assert_allclose(card.to_host(there), y + 1.5 * x.astype("float64"), rtol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_a_ratio_is_zero_where_it_would_divide_by_zero(dtype: str) -> None:
    card = by_name("cuda")
    for shape in ((), (5,), (4, 3)):
        a, b = numbers(shape, dtype), numbers(shape, dtype)[...].copy()
        b.reshape(-1)[::2] = 0
        found = card.to_host(card.safe_ratio(card.from_host(a), card.from_host(b)))
        zero = b == 0
        np.testing.assert_allclose(found, np.where(zero, 0, a / np.where(zero, 1, b)), rtol=1e-6)
        assert found.dtype == np.dtype(dtype) and found.shape == shape
    real = np.array([2.0, 0.0])
    a = numbers((3, 2), "complex128")
    found = card.to_host(card.safe_ratio(card.from_host(a), card.from_host(real)))
    np.testing.assert_allclose(found, np.stack([a[:, 0] / 2, np.zeros(3)], axis=1))
