"""Which copies of operands a product can have, how many columns at a time, and what is predicted for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bsrgemm._kernels.element_types import types
from bsrgemm._products.call import Problem
from bsrgemm._products.copied import Copied, panel_width
from bsrgemm._products.costs import H200
from bsrgemm._products.gemm_sm90 import GemmSm90
from bsrgemm._products.prepared import fastest, options
from bsrgemm._products.real_views import RealViews

F32 = np.dtype(np.float32)
HALF = types(*[np.dtype(np.float16)] * 3, F32, np.dtype(np.int32))
USUAL = Problem(
    "sm_90a", types(F32, F32, F32, F32, np.dtype(np.int32)), R=32, K=32, N=8192, batches=1, block_rows=256,
    block_cols=256, blocks=14400, transposed=False, b_order="C", c_order="C", overwrite=True, aligned=True, tf32=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "order", "parts", "columns"),
    [
        ({}, "F", 1, 8192),
        ({}, "", 0, 8192),
        ({"N": 8192 + 64}, "F", 1, 8192),  # more columns than 256 MiB hold
        ({"N": 8193}, "F", 1, 7936),  # the last panel has 257 columns, and not one
        ({"N": 8192 + 63}, "F", 1, 7936),
        ({"batches": 2}, "C", 0, 4096),
        ({"N": 300}, "F", 1, 300),
        ({"batches": 33}, "F", 1, 0),  # a panel of 256 columns would be too large
        ({}, "F", 2, 4096),
    ],
    ids=str,
)
def test_panels(change: dict[str, Any], order: str, parts: int, columns: int) -> None:
    assert panel_width(replace(USUAL, **change), Copied(None, "", order, parts)) == columns


def test_which_copies_there_are() -> None:
    """Those that some kernel can read and could not read, or not as fast, without them."""

    def copies(**change: Any) -> set[tuple[str, str, int, bool]]:
        found = options(replace(USUAL, **change))
        return {(x.blocks, x.order, x.parts, x.result) for x in found if isinstance(x, Copied)}

    assert copies() == {("", "F", 1, False)}
    assert copies(tf32=False) == {("", "F", 2, False)}
    assert copies(arch="sm_80") == set()
    assert copies(types=HALF) == set()
    assert copies(types=HALF, b_order="F") == {("", "C", 0, False)}
    assert copies(types=HALF, R=20, K=20) == {("lines", "", 0, False)}
    assert ("turned", "", 0, False) in copies(types=HALF, transposed=True)
    assert ("", "", 0, True) in copies(types=HALF, c_order="") and not copies(types=HALF, c_order="", overwrite=False)
    assert copies(types=HALF, N=1, b_order="F") == set()


def test_infinite_time_is_never_chosen_and_every_option_has_a_finite_one() -> None:
    for change in ({}, {"transposed": True}, {"R": 3, "K": 3}, {"types": HALF, "b_order": ""}, {"N": 2}):
        one = replace(USUAL, **change)
        times = {kernel: kernel.seconds(one, H200) for kernel in options(one)}
        assert all(0 < t < 100 for t in times.values())
        assert times[fastest(one, H200, True)] == min(times.values())


def test_copies_that_take_more_than_4_gib_are_never_chosen() -> None:
    large = replace(USUAL, types=HALF, transposed=True, R=24, K=24, blocks=2**22)
    option = next(x for x in options(large) if isinstance(x, Copied) and x.blocks == "turned")
    assert option.bytes(large, option.inner(large)) == 2**22 * 24 * 24 * 2 > 4 << 30
    assert option.seconds(large, H200) == float("inf") > option.seconds(replace(large, blocks=2**21 // 2), H200)


def test_another_card_has_other_times() -> None:
    """Fewer multiprocessors and less bandwidth take longer."""
    small = replace(H200, multiprocessors=66, bandwidth=H200.bandwidth / 2)
    for kernel in options(replace(USUAL, N=1024)):
        assert kernel.seconds(USUAL, small) > 1.2 * kernel.seconds(USUAL, H200)


def test_b_in_two_parts_is_multiplied_by_gemm_sm90_whatever_its_size() -> None:
    for columns in (2, 16, 17, 64, 8192):
        config = fastest(replace(USUAL, R=16, K=16, N=columns, tf32=False, parts=2, b_order="F"), H200, False)
        assert isinstance(config, GemmSm90) and config.parts == 2 and config.b_transposed


# ------------------------------------------------------------------------------------------------ complex products
C64 = np.dtype(np.complex64)
COMPLEX = replace(USUAL, arch="sm_80", types=types(C64, C64, C64, C64, np.dtype(np.int32)), R=16, K=8, N=64, blocks=9)


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True),
        ({"arch": "sm_75"}, False),
        ({"line": 144}, False),
        ({"R": 3, "K": 5}, True),
        ({"transposed": True}, False),  # but its copy is
        ({"c_order": "F"}, False),
        ({"c_order": "", "N": 1}, True),
        ({"batches": 2}, True),
        ({"types": types(C64, F32, C64, C64, np.dtype(np.int32))}, False),
        ({"types": types(C64, C64, np.dtype("D"), np.dtype("D"), np.dtype(np.int32))}, False),
        ({"types": USUAL.types}, False),
        ({"blocks": 2**30 // 128 - 1}, True),  # twice as many numbers are counted with 31 bits
        ({"blocks": 2**30 // 128}, False),
        ({"blocks": 0}, False),
    ],
    ids=str,
)
def test_which_complex_products_are_served_by_real_ones(change: dict[str, Any], served: bool) -> None:
    assert RealViews.serves(replace(COMPLEX, **change)) == served
