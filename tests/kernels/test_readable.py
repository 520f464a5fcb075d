"""Copies of operands that TMA cannot read: whatever their strides are, lines begin at whole sectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm._attention import choose, longer_lines
from bsrgemm._attention.forward import mappable

from ..devices import Device
from .attentions import BF16, E4M3, F16, Case, cases, check, operands

U8 = np.dtype(np.uint8)
IN_ORDER = (0, 1, 2, 3)


@pytest.mark.parametrize("dtype", [U8, F16], ids=str)
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        *(((2, 4, 33, 36), IN_ORDER), ((2, 33, 4, 36), (0, 2, 1, 3)), ((4, 2, 33, 20), (1, 0, 2, 3))),
        *(((1, 1, 5, 7), IN_ORDER), ((2, 4, 36, 33), (0, 1, 3, 2)), ((2, 1, 33, 4), IN_ORDER)),
        ((4, 33, 3, 20), (2, 0, 1, 3)),  # no batch of matrices, unless in another order
    ],
)
def test_a_copy_has_the_same_elements_in_whole_sectors(shape: Any, order: Any, dtype: Any, device: Device) -> None:
    elements = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    x = device.asarray(elements).transpose(order)
    copy = longer_lines.readable(x)
    assert mappable(copy) and all(step % 32 == 0 for step in copy.strides[:3])
    np.testing.assert_array_equal(device.asnumpy(copy), elements.transpose(order))
    assert longer_lines.readable(copy) is copy


@cases(
    Case((70, 150), (36, 20), {"causal": True}),
    Case((70, 150), (37, 64), dtype=BF16, heads=(4, 2), batch=2, layout="bshd"),
    Case((70, 150), (64, 64), lie=("columns", "every second column", "backwards", "odd rows")),
    Case((70, 150), (72, 40), {"causal": True}, E4M3, heads=(4, 2), batch=2),
)
@pytest.mark.parametrize("kernel", ["AttentionSm80", "AttentionSm90"])
def test_operands_of_any_strides_run_on_tensor_cores(
    kernel: str, case: Case, device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.needs("sm_90a")
    if case.dtype == E4M3 and kernel == "AttentionSm80":
        pytest.skip("fp8 runs on Hopper")
    monkeypatch.setattr(choose, "_FEW_PAIRS", 0)
    check(device, kernel, case, operands(rng, case))
