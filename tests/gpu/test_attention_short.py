"""attention_short_sm90 in the shapes that a rule can choose, on a Hopper card, against float64."""

from __future__ import annotations

from typing import Any

import pytest

from bsrgemm import attention
from bsrgemm.dtypes import BFLOAT16

from .attention_cases import BANDS, F16, check, operands, plans, shape  # noqa: F401  (fixtures)
from .marks import some_under_memcheck
from .repeats import differing

SHORT = "attention_short_sm90"
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


@pytest.fixture(autouse=True, params=[64, 128])
def D(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture(autouse=True, params=range(3))
def tiles(request: pytest.FixtureRequest, D: int, shape, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: F811
    """Every shape of the rule."""
    from bsrgemm._attention import heuristics

    shapes = [shape for _, shape in heuristics.SHORT_SHAPES[D]]
    if request.param >= len(shapes):
        pytest.skip("there are fewer shapes")
    monkeypatch.setattr(heuristics, "_short_shape", lambda problem: shapes[request.param])
    return shapes[request.param]


@pytest.mark.parametrize("S", some_under_memcheck([1, 63, 129, 515], [129]))
def test_bands_at_odd_lengths_on_a_card(S, D, rng) -> None:
    q, k, v = operands(rng, S, S, D)
    for band in BANDS:
        check(q, k, v, on=SHORT, **band)


@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=str)
@pytest.mark.parametrize("lengths", [(300, 777), (777, 300), (1, 1000)], ids=str)
def test_groups_of_heads_and_different_lengths_on_a_card(lengths, dtype, D, rng) -> None:
    q, k, v = operands(rng, *lengths, D, B=2, heads=(6, 2), dtype=dtype)
    for band in BANDS:
        check(q, k, v, on=SHORT, **band)


def test_results_are_the_same_bits_every_time_on_a_card(D, rng) -> None:
    q, k, v = operands(rng, 500, 500, D, heads=(64, 64))
    first = attention(q, k, v, causal=True)
    assert differing(lambda: attention(q, k, v, causal=True), first, 50) == 0
