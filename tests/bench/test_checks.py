"""The checks tell right from wrong: an element that is missing, a key too many, a gradient that is off."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bench import checks
from bench.cases.attention import Attention, Decode, Gradients
from bench.cases.products import Product
from bench.cases.sparse import Sampled, Square
from bench.data import PATTERNS, from_lengths, normal, widen, zipf_lengths
from bench.place import Place

PLACE = Place("cpu", quick=True)


# ----------------------------------------------------------------------------------------- patterns
@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_has_sorted_columns_and_about_as_many_blocks_as_asked(name: str) -> None:
    rows, each = 27, 4
    columns, starts = PATTERNS[name](rows, rows, each)
    assert starts[0] == 0 and starts[-1] == len(columns) and len(starts) == rows + 1
    for start, end in pairwise(starts):
        assert (np.diff(columns[start:end]) > 0).all() and (columns[start:end] < rows).all()
    exact = {"uniform", "power-law", "one dense row", "banded", "near diagonal"}
    assert name not in exact or len(columns) == rows * each


def test_large_uniform_patterns_are_drawn_strip_by_strip() -> None:
    columns, _ = from_lengths(np.full(5000, 3), 5000)
    assert len(columns) == 15000 and (np.diff(columns.reshape(-1, 3), axis=1) > 0).all()
    with pytest.raises(ValueError, match="rows of different lengths"):
        from_lengths(np.arange(5000), 5000)


def test_lengths_by_rank_add_up() -> None:
    lengths = zipf_lengths(50, 40, 400)
    assert lengths.sum() == 400 and lengths.max() <= 40 and (np.diff(lengths) <= 0).all()


def test_numbers_are_drawn_and_widened_in_every_kind() -> None:
    for kind in checks.TOLERANCE:
        x = widen(normal((4096,), kind, np))
        assert x.dtype == np.float64 and abs(x.mean()) < 0.1 and abs(x.std() - 1) < 0.1


# ----------------------------------------------------------------------------------------- products
FORMS = ("A @ B", "A.T @ B", "B @ A", "batch")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "bfloat16"])
def test_a_wrong_element_is_found_in_every_form(form: str, kind: str) -> None:
    case = Product(128, (16, 16), 0.3, 8, kind, form=form)
    A, B = case.matrix(PLACE), case.right(PLACE)
    C = np.array(case.call(A, B, np)())
    assert case.error(A, B, C) <= 1
    C[..., 3, 1] += 4
    assert case.error(A, B, C) > 1
    C[..., 3, 1] = np.nan
    assert not case.error(A, B, C) <= 1


SPARSE = (
    Square(128, 16),
    Square(128, 16, planned=True),
    Square(cells=2),
    Sampled(128, 16, "float32"),
    Sampled(64, 16, "float64", "column"),
)


@pytest.mark.parametrize("case", SPARSE, ids=str)
def test_a_missing_block_of_a_sparse_result_is_found(case: Any) -> None:
    ready = case.ready(PLACE)
    C = ready.call()
    assert ready.error(C) <= 1
    C.data[len(C.data) // 2] = 0
    assert ready.error(C) > 1


def test_squares_of_other_libraries_are_checked_in_the_same_way() -> None:
    ready = Square(cells=2).ready(PLACE)
    for name in ("scipy bsr", "scipy csr"):
        S = ready.peers[name]().call()
        assert ready.error(S) <= 1
        S.data[3] += 1
        assert ready.error(S) > 1


# ---------------------------------------------------------------------------------------- attention
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": 9},
    "blocks": {"blocks": (16, 2), "per_head": True},
    "shared heads": {"causal": True, "kv_heads": 1},
}


@pytest.mark.parametrize("name", MASKS)
def test_attention_and_its_gradients_are_right_and_those_of_another_mask_are_not(name: str) -> None:
    case = Attention(1, 2, 64, 16, kind="float32", **MASKS[name])
    (q, k, v), mask = case.operands(PLACE), case.mask(PLACE)
    reference = checks.Reference.of(case.seen(mask), q, k, v)
    allowed = checks.TOLERANCE["float32"].attention
    assert reference.error(case.call(PLACE, q, k, v, mask)()) <= allowed
    other = {"causal": name == "full"}
    assert reference.error(bg.attention(q, k, v, window=(3, 0), **other)) > allowed
    whole = Gradients(case)
    x = whole.operands(PLACE)
    got = [np.array(y) for y in whole.call(x, PLACE)()]
    seen = case.seen(x.mask)
    assert checks.gradients_error(x, seen, None, got) <= checks.TOLERANCE["float32"].gradients
    for y in got:
        y[0, -1, 5:] *= 1.01
        assert checks.gradients_error(x, seen, None, got) > checks.TOLERANCE["float32"].gradients
        y[0, -1, 5:] /= 1.01


def test_gradients_under_a_softcap_are_checked() -> None:
    case = Attention(1, 2, 64, 16, causal=True, kind="float32", softcap=2.0)
    x = Gradients(case).operands(PLACE)
    got = Gradients(case).call(x, PLACE)()
    errors = [checks.gradients_error(x, case.seen(None), cap, got) for cap in (2.0, None)]
    assert errors[0] <= checks.TOLERANCE["float32"].gradients < errors[1]


@pytest.mark.parametrize("causal", [False, True])
def test_exact_gradients_are_those_of_finite_differences(causal: bool) -> None:
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 1, 6, 4))
    seen = checks.Seen(1, causal)
    place = np.arange(6)

    def value(q: Any) -> float:
        out = checks.exact_attention(q[0, 0], k[0, 0], v[0, 0], seen(0, 0, place[:, None], place[None]))
        return float((out * dout[0, 0]).sum())

    step = np.zeros_like(q)
    step[0, 0, 4, 1] = 1e-5
    dq = checks.exact_gradients(q, k, v, dout, causal)[0]
    assert dq[0, 0, 4, 1] == pytest.approx((value(q + step) - value(q - step)) / 2e-5, rel=1e-6)


@pytest.mark.parametrize("share", [None, 0.25])
def test_decode_is_right_and_that_of_other_keys_is_not(share: float | None) -> None:
    ready = Decode(2, 512, heads=4, kv_heads=2, head_dim=16, kind="float32", share=share).ready(PLACE)
    got = np.array(ready.call())
    assert ready.error(got) <= 1 < ready.error(got[::-1])
    assert ready.error(ready.peers["all keys" if share else "NumPy"]().call()) <= 1 or share


def test_masks_of_blocks_are_read_from_their_lists() -> None:
    mask = bg.BlockMask.random(64, per_row=2, heads=(1, 2), block=16, device="cpu")
    dense = mask.to_dense().reshape(1, 2, 64, 64)
    seen = checks.Seen(2, mask=mask)
    place = np.arange(64)
    for head in range(2):
        np.testing.assert_array_equal(seen(0, head, place[:, None], place[None]), dense[0, head])
