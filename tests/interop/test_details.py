"""Small promises of ranks and panels: which error all ranks raise, how elements are counted, automatic panels."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm.interop import mpi
from bsrgemm.interop.communicator import together

from .ranks import outcomes_of, run


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("ValueError", ValueError), ("Unheard", RuntimeError), ("int", RuntimeError), ("print", RuntimeError)],
)
def test_all_ranks_raise_the_error_of_one_or_a_runtime_error_if_python_has_no_such_error(
    name: str, wanted: type[Exception]
) -> None:
    error = ValueError if name == "ValueError" else type(name, (Exception,), {})
    assert name == "Unheard" or hasattr(builtins, name)

    def program(comm: Any) -> None:
        with together(comm):
            if comm.rank == 1:
                raise error("a bad number")

    for found in outcomes_of(2, program):
        assert type(found) is wanted and str(found) == "a bad number [on rank 1]"


def test_elements_of_all_ranks_are_counted_in_64_bits() -> None:
    A = bg.eye(12, blocksize=(2, 2))

    def program(comm: Any) -> list[Any]:
        sent, reduce = [], comm.allreduce

        def noting(array: Any, operation: str = "sum") -> Any:
            sent.append(array.dtype)
            return reduce(array, operation)

        comm.allreduce = noting
        assert mpi.partition(A if comm.rank == 0 else None, comm).nnz == A.nnz
        return sent

    for dtypes in run(2, program):
        assert dtypes and all(dtype == np.int64 for dtype in dtypes if dtype.kind == "i")


def test_automatic_panels_consist_of_whole_panels_of_before() -> None:
    pytest.importorskip("dask.array")
    import dask

    from bsrgemm.interop import dask as panels

    A = panels.from_bsr(bg.random(120, 48, blocksize=(4, 3), density=0.4, seed=0), 12)
    with dask.config.set({"array.chunk-size": 48 * 8 * 50}):  # 50 rows, which is no multiple of a block
        made = A.rechunk({0: "auto"})
    assert set(made.chunks[0][:-1]) <= {24, 36, 48} and sum(made.chunks[0]) == 120
    np.testing.assert_array_equal(made.compute().toarray(), A.compute().toarray())
