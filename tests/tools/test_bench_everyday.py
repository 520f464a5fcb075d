"""The benchmark of everyday operations: every operation runs on every kind of matrix, and gives what scipy gives."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from bsrgemm._benchmark.measure import everyday


@pytest.fixture(scope="module")
def operands() -> dict[str, everyday.Case]:
    return everyday.cases("tiny")


def as_numbers(x: Any) -> Any:
    """A result in a form that can be compared."""
    if isinstance(x, tuple):
        return sorted(zip(*(np.asarray(y).tolist() for y in x), strict=True))
    return x.toarray() if sp.issparse(x) or hasattr(x, "toarray") else x


@pytest.mark.parametrize("what", [name for name in everyday.OPERATIONS if name not in ("str(A)", "repr(A)")])
def test_every_operation_gives_what_scipy_gives(what: str, operands: dict[str, everyday.Case]) -> None:
    call, peers = everyday.OPERATIONS[what]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, theirs = (as_numbers(call(operands[kind])) for kind in ("bsrgemm", peers[-1]))
    if ours is None:  # in place
        assert theirs is None
    else:
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-12, atol=1e-12)


def test_what_is_slower_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    everyday.main(["--matrix", "tiny", "--only", "A + B"])
    assert "1 operations, " in capsys.readouterr().out
