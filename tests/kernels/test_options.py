"""Whatever can be chosen for a product is exact: every kernel with every copy of its operands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm._kernels.card import Card
from bsrgemm._products import cuda, dense, prepared
from bsrgemm._products.call import Problem
from bsrgemm._products.dense import Dense

from ..devices import Device
from .products import BF16, F16, F32, F64, I8, I32, Case, cases, check, matrix


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the n-th option be chosen, and say how many there are."""
    monkeypatch.setattr(dense, "_LARGE", 0)
    found: dict[str, Any] = {"n": 0, "options": []}

    def choose(problem: Problem, card: Card, copies: bool = True) -> Dense:
        found["options"] = list(prepared.options(problem))
        return found["options"][found["n"]]

    monkeypatch.setattr(cuda, "choose", choose)
    return found


def described(option: Any) -> str:
    return f"{type(option).__name__} {getattr(option, 'kernel', '')} {option}"


def every_option(device: Device, case: Case, chosen: Any, rng: np.random.Generator) -> Iterator[str]:
    A = matrix(rng, case, unique=case.dtype == I8)
    while True:
        try:
            check(device, None, case, A)
        except AssertionError as error:
            raise AssertionError(described(chosen["options"][chosen["n"]])) from error
        yield described(chosen["options"][chosen["n"]])
        chosen["n"] += 1
        if chosen["n"] >= len(chosen["options"]):
            return


@cases(
    *(
        Case(dtype, block, N, beta=beta, b=b, transposed=turned, batches=batches, rows=4, cols=4)
        for dtype, block, N, beta, b, turned, batches in (
            (F16, (24, 24), 72, 0, "C16", False, 0),
            (F16, (40, 20), 64, 0, "C", True, 0),
            (BF16, (12, 50), 33, -1, "C", False, 2),
            (F16, (100, 100), 130, 0, "F16", False, 0),
            (F16, (120, 72), 65, 0, "F", True, 0),
            (F16, (8, 8), 24, 0, "gaps", False, 0),
            (F32, (24, 20), 40, -1, "C", False, 0),
            (F32, (33, 36), 33, 0, "F", True, 0),
            (F64, (25, 3), 24, 0, "C16", False, 0),
            (F64, (50, 7), 17, -1, "C", True, 2),
            (F64, (3, 3), 130, 0, "F16", False, 0),
            (I8, (24, 40), 48, 0, "C16", False, 0),
            (F16, (32, 32), 64, 0, "C16", False, 0),
            (F16, (16, 16), 256, 0, "C16", False, 0),
        )
    ),
    Case(F16, (24, 56), 72, beta=0, c="F", rows=4, cols=4, transposed=True),
    Case(F64, (6, 8), 34, beta=0, b="F", c="F", rows=4, cols=4, batches=2),
    Case(F16, (24, 24), 512, beta=0, rows=9, cols=9, density=0.3),
    Case(F32, (20, 12), 40, precision="tf32", b="C", beta=0, rows=4, cols=4),
    Case(I8, (17, 33), 40, I32, b="C", beta=0, rows=4, cols=4),
)
def test_every_option_is_exact(case: Case, device: Device, chosen: Any, rng: np.random.Generator) -> None:
    device.needs("sm_90a")
    said = list(every_option(device, case, chosen, rng))
    print("\n".join(said))
    assert len(said) == len(chosen["options"]) > 1
