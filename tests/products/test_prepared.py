"""When a product in float32 or tf32 copies B column by column, and how many columns at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bsrgemm._kernels.element_types import types
from bsrgemm._products.call import Problem
from bsrgemm._products.choice import by_rule
from bsrgemm._products.gemm_sm90 import GemmSm90
from bsrgemm._products.prepared import ByColumns, RealViews, column_panel, compiled_for

F32 = np.dtype(np.float32)
HALF = types(*[np.dtype(np.float16)] * 3, F32, np.dtype(np.int32))
USUAL = Problem(
    "sm_90a", types(F32, F32, F32, F32, np.dtype(np.int32)), R=32, K=32, N=8192, batches=1, block_rows=256,
    block_cols=256, blocks=14400, transposed=False, b_order="C", c_order="C", overwrite=True, aligned=True, tf32=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "columns"),
    [
        ({}, 8192),
        ({"b_order": ""}, 8192),
        ({"overwrite": False}, 8192),
        ({"N": 8192 + 64}, 8192),  # more columns than 256 MiB hold
        ({"N": 8193}, 7936),  # the last panel has 257 columns, and not one
        ({"N": 8192 + 63}, 7936),
        ({"batches": 2}, 4096),
        ({"N": 300}, 300),
        ({"batches": 33}, 0),  # a panel of 256 columns would be too large
        ({"b_order": "F"}, 0),
        ({"tf32": False}, 4096),  # in two parts
        ({"tf32": False, "b_order": "F"}, 4096),
        ({"tf32": False, "N": 95, "blocks": 65536}, 0),
        ({"tf32": False, "N": 96, "blocks": 65536}, 96),
        ({"tf32": False, "b_order": "", "N": 1024, "blocks": 256 * 14}, 1024),  # 448 elements in a column of A
        ({"tf32": False, "N": 1024, "blocks": 256 * 14 - 1}, 0),
        ({"tf32": False, "N": 1024, "R": 64, "block_rows": 128, "blocks": 1024}, 1024),  # 256
        ({"tf32": False, "N": 1024, "R": 64, "block_rows": 128, "blocks": 1023}, 0),
        ({"tf32": False, "N": 2048, "R": 16, "block_rows": 512, "blocks": 2048}, 2048),  # 128
        ({"tf32": False, "N": 2048, "R": 16, "block_rows": 512, "blocks": 2047}, 0),
        ({"tf32": False, "transposed": True}, 0),
        ({"tf32": False, "types": HALF}, 0),
        ({"arch": "sm_80"}, 0),
        ({"transposed": True}, 0),
        ({"blocks": 4096}, 8192),  # 512 elements in a column of A
        ({"blocks": 4095}, 0),
        ({"R": 16, "block_rows": 512, "blocks": 3072}, 8192),  # 192
        ({"R": 16, "block_rows": 512, "blocks": 3071}, 0),
        ({"R": 24}, 0),
        ({"K": 12}, 0),
        ({"N": 72}, 0),  # too little to compute
        ({"aligned": False}, 0),
    ],
    ids=str,
)
def test_panels(change: dict[str, Any], columns: int) -> None:
    assert column_panel(replace(USUAL, **change)) == columns


def test_the_kernels_of_a_product_by_copies() -> None:
    for tf32, parts in ((True, 1), (False, 2)):
        copying, multiplying = compiled_for(replace(USUAL, tf32=tf32))
        assert copying.parts == parts
        assert isinstance(multiplying, GemmSm90) and multiplying.parts == parts
        assert ByColumns.best(replace(USUAL, tf32=tf32)).copy == copying
        little = replace(USUAL, tf32=tf32, N=16)
        assert compiled_for(little) == (by_rule(little),)


def test_b_in_two_parts_is_multiplied_by_gemm_sm90_whatever_its_size() -> None:
    for columns in (2, 16, 17, 64, 8192):
        config = by_rule(replace(USUAL, R=16, K=16, N=columns, tf32=False, parts=2, b_order="F"))
        assert isinstance(config, GemmSm90) and config.parts == 2 and config.b_transposed


# ------------------------------------------------------------------------------------------------ complex products
C64 = np.dtype(np.complex64)
COMPLEX = replace(USUAL, arch="sm_80", types=types(C64, C64, C64, C64, np.dtype(np.int32)), R=16, K=8, N=64, blocks=9)


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True),
        ({"arch": "sm_75"}, False),
        ({"N": 63}, False),
        ({"R": 24}, False),
        ({"K": 12}, False),
        ({"transposed": True}, True),
        ({"batches": 2}, False),
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
