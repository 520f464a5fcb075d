"""attention_sm80, the portable kernel, forced on whatever card there is since Ampere, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from bsrgemm import attention
from bsrgemm._kernels import forced_kernel
from bsrgemm.dtypes import BFLOAT16

from .attention_cases import (  # noqa: F401  (fixtures)
    BANDS,
    CLIMBS,
    F16,
    F32,
    MASKS,
    SEQUENCES,
    SM80,
    assert_near,
    bounds_of,
    check,
    check_garbage_behind_the_diagonal,
    normal,
    operands,
    plans,
    reference,
    sequences_seen,
    shape,
)
from .marks import some_under_memcheck
from .repeats import differing

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _only() -> Iterator[None]:
    with forced_kernel.force_kernel("AttentionSm80"):
        yield


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("S", some_under_memcheck([1, 63, 129, 300, 515], [129]))
def test_portable_bands_at_odd_lengths(S, D, rng) -> None:
    q, k, v = operands(rng, S, S, D)
    for band in BANDS:
        check(q, k, v, on=SM80, **band)


@pytest.mark.parametrize("lengths", [(300, 777), (777, 300), (1, 1000)], ids=str)
def test_portable_queries_and_keys_of_different_lengths(lengths, rng) -> None:
    q, k, v = operands(rng, *lengths, 128, B=2, heads=(6, 2))
    for band in BANDS:
        check(q, k, v, on=SM80, **band)


@pytest.mark.parametrize("dtype", [F16, BFLOAT16], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (192, 192), (256, 256), (72, 40), (192, 128)], ids=str)
def test_portable_head_dims(dims, dtype, rng) -> None:
    q, k, v = operands(rng, 200, 333, *dims, heads=(4, 1), dtype=dtype)
    check(q, k, v, on=SM80, causal=True)
    check(q, k, v, on=SM80, layout="bshd", out_dtype=F32)


@pytest.mark.parametrize("options", [{"softcap": 7.0}, {"scale": -0.3}, {"scale": 0.0}, {"scale": 2.0}], ids=str)
def test_portable_softcap_and_any_scale(options, rng) -> None:
    q, k, v = operands(rng, 140, 300, 128)
    check(q, k, v, on=SM80, causal=True, **options)


@pytest.mark.parametrize("climb", CLIMBS)
def test_portable_maxima_that_climb(climb, rng) -> None:
    import cupy

    q, k, v = operands(rng, 200, 1500, 64, heads=(2, 2))
    q[...] = 0.01 * q
    q[..., 0] = 1
    k[..., 0] = cupy.asarray(CLIMBS[climb](rng).astype(F16))
    check(q, k, v, on=SM80, scale=1.0)


@pytest.mark.parametrize("block", some_under_memcheck([16, (48, 80), 64, 128, 256], [(48, 80)]))
@pytest.mark.parametrize("name", MASKS)
def test_portable_masks(name, block, rng) -> None:
    q, k, v = operands(rng, 333, 401, 128, B=2, heads=(4, 2))
    mask = MASKS[name](333, 401, block)
    check(q, k, v, on=SM80, mask=mask)
    check(q, k, v, on=SM80, mask=mask, window=(100, 20))


@pytest.mark.parametrize("name", SEQUENCES)
def test_portable_sequences(name, rng) -> None:
    q_bounds, k_bounds = bounds_of(name)
    q = normal(rng, (q_bounds[-1], 4, 128))
    k, v = (normal(rng, (k_bounds[-1], 2, 128)) for _ in range(2))
    for band in ({}, {"causal": True}):
        want = reference(*(x[None].swapaxes(1, 2) for x in (q, k, v)), sequences_seen(q_bounds, k_bounds, **band))
        out, lse = attention(q, k, v, return_lse=True, cu_seqlens_q=q_bounds, cu_seqlens_k=k_bounds, **band)
        assert_near(out[None].swapaxes(1, 2), lse[None], want, v[None].swapaxes(1, 2), 128, F16, SM80)


@pytest.mark.sanitizer
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_portable_garbage_behind_the_diagonal(bad, rng) -> None:
    check_garbage_behind_the_diagonal(rng, bad, SM80)


def test_portable_results_are_the_same_bits_every_time(rng) -> None:
    q, k, v = operands(rng, 700, 900, 128, B=2, heads=(8, 2))
    first = attention(q, k, v, causal=True)
    assert differing(lambda: attention(q, k, v, causal=True), first, 200) == 0
