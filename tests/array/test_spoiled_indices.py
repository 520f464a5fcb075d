"""Index arrays that the user has spoiled: an error on the host, clamped by kernels."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from ..strategies import Place, assert_values
from .refused import matrix, ones, sample

pytestmark = pytest.mark.fake

CORRUPTIONS = {
    "an index far outside": "A.indices[1] = 10**8",
    "an index just outside": "A.indices[1] = 2",
    "a negative index": "A.indices[1] = -1",
    "a very negative index": "A.indices[1] = -(10**8)",
    "a pointer far outside": "A.indptr[-1] = 10**6",
    "a pointer just outside": "A.indptr[-1] = 4",
    "a pointer that falls": "A.indptr[1] = 3; A.indptr[2] = 1",
    "a pointer in the middle far outside": "A.indptr[1] = 10**6",
    "a negative pointer": "A.indptr[1] = -5",
    "a first pointer that is not 0": "A.indptr[0] = 1",
    "fewer indices": "A.indices = A.indices[:1].copy()",
    "fewer blocks": "A.data = A.data[:1].copy()",
    "fewer pointers": "A.indptr = A.indptr[:2].copy()",
}
#: Operations whose result depends on every index and pointer.
READERS = {
    "A @ x": "A @ np.ones(6)",
    "A @ X": "A @ np.ones((6, 3))",
    "X @ A": "np.ones((3, 4)) @ A",
    "A.T @ x": "A.T @ np.ones(4)",
    "A.T @ X": "A.T @ np.ones((4, 3))",
    "X @ A.T": "np.ones((3, 6)) @ A.T",
    "A @ batch": "A @ np.ones((2, 6, 3))",
    "A.T.data": "A.T.data",
    "a copied A.T": "A.transpose(copy=True)",
    "A @ B.T": "A @ B.T",
    "B.T @ A": "B.T @ A",
    "A + B": "A + B",
    "A.multiply(B)": "A.multiply(B)",
    "toarray": "A.toarray()",
    "tocsr": "A.tocsr()",
    "tocoo": "A.tocoo()",
    "tocsc": "A.tocsc()",
    "tobsr": "A.tobsr((1, 1))",
    "check_format": "A.check_format()",
}
#: Operations that may do without some of them.
OTHERS = {
    "sum over rows": "A.sum(axis=1)",
    "sum over columns": "A.sum(axis=0)",
    "max": "A.max(axis=0)",
    "argmax": "A.argmax(axis=1)",
    "nonzero": "A.nonzero()",
    "diagonal": "A.diagonal()",
    "setdiag": "A.setdiag(1.0)",
    "slice": "A[2:, :3]",
    "assignment": "A[2:, :3] = 0.0",
    "sort_indices": "A.sort_indices()",
    "sum_duplicates": "A.sum_duplicates()",
    "eliminate_zeros": "A.eliminate_zeros()",
    "resize": "A.resize(2, 3)",
    "print": "str(A)",
}
SCRIPT = """
import json, sys
import numpy as np
import bsrgemm as bg

corruptions, operations = json.load(sys.stdin)
np.seterr(all="ignore")

def matrix():
    data = (np.arange(18.0).reshape(3, 2, 3) % 7) + 1
    return bg.bsr_array((data, np.array([1, 0, 1]), np.array([0, 1, 3])), shape=(4, 6))

for kind, corruption in corruptions.items():
    for name, code in operations.items():
        print(f"{kind}: {name}", end=": ", flush=True)  # the last line says what crashed
        scope = {"A": matrix(), "B": matrix(), "np": np}
        exec(corruption, scope)
        try:
            exec(code, scope)
            print("no error")
        except Exception as error:
            print(type(error).__name__)
"""


def test_index_arrays_spoiled_by_the_user_end_in_an_error_on_the_host() -> None:
    """In a process of its own: what is tested is that it does not crash."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        input=json.dumps([CORRUPTIONS, READERS | OTHERS]),
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"exit status {done.returncode} after {lines[-1:]}: {done.stderr[-2000:]}"
    assert len(lines) == len(CORRUPTIONS) * len(READERS | OTHERS)
    outcomes = [tuple(line.rsplit(": ", 2)) for line in lines]
    errors = ("ValueError", "IndexError")
    assert [x for x in outcomes if x[1] in READERS and x[2] not in errors] == []
    assert [x for x in outcomes if x[1] in OTHERS and x[2] not in ("no error", *errors)] == []


@pytest.mark.gpu
@pytest.mark.parametrize("corruption", list(CORRUPTIONS.values())[:10], ids=list(CORRUPTIONS)[:10])
def test_kernels_clamp_index_arrays_spoiled_by_the_user(corruption: str) -> None:
    place = Place("cuda")
    A = matrix(place)
    exec(corruption, {"A": A})
    X = ones(place, 6, 5)
    for result in (A @ X, A @ X[:, 0]):
        assert result.shape[0] == 4
    for result in (A.T @ X[:4], A.T @ X[:4, 0]):
        assert result.shape[0] == 6
    good = matrix(place) @ X  # the device still works
    assert_values(place.dense(good), sample().dense @ np.ones((6, 5)))
