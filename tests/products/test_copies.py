"""When a product in tf32 copies B column by column, and how many columns at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bsrgemm._kernels.element_types import types
from bsrgemm._products.copies import tf32_panel
from bsrgemm._products.heuristics import Problem

F32 = np.dtype(np.float32)
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
        ({"tf32": False}, 0),
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
    assert tf32_panel(replace(USUAL, **change)) == columns
