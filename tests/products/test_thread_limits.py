"""What docs/how-do-i.md says about threads on the CPU: how many run, and what limits them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

import bsrgemm as bg
from bsrgemm._backend import threads
from bsrgemm._products import host

#: Prints how many threads of the package a large and a small product start.
COUNT = """
import threading, numpy as np, bsrgemm as bg
from bsrgemm._backend import threads

started = []
threads.cores = lambda: 4
real = threading.Thread.start
threading.Thread.start = lambda self: (started.append(self.name), real(self))[1]
for blocks, columns in ((64, 512), (2, 4)):
    data = np.ones((8 * blocks, 32, 32), np.float32)
    A = bg.bsr_array((data, np.tile(np.arange(8), blocks), np.arange(0, 8 * blocks + 1, 8)), shape=(32 * blocks, 256))
    started.clear()
    A @ np.ones((256, columns), np.float32)
    print(started.count("bsrgemm"))
"""


def started(**environment: str) -> list[int]:
    root = str(Path(bg.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", COUNT], env={**os.environ, "PYTHONPATH": root, **environment}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return [int(line) for line in done.stdout.split()]


@pytest.mark.parametrize("allowed", [1, 2, 3])
def test_the_environment_limits_the_threads_of_products(allowed: int) -> None:
    names = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(allowed))
    blas = [library for library in threadpool_info() if library["user_api"] == "blas"]
    if not blas:
        pytest.skip("there is no BLAS whose threads can be limited")
    large, small = started(**names)
    # OpenBLAS has no more threads than there are cores
    assert large == min(allowed, threads.cores()) - 1 and small == 0


def test_blas_has_its_threads_back_after_a_product() -> None:
    A = bg.bsr_array(np.ones((64, 64), np.float32), blocksize=(16, 16))
    with threadpool_limits(2, user_api="blas"):
        before = [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]
        A @ np.ones((64, 8), np.float32)
        after = [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]
    assert before == after


def test_the_page_names_the_most_threads() -> None:
    page = (Path(bg.__file__).parents[1] / "docs" / "how-do-i.md").read_text(encoding="utf-8")
    assert f"and {host._MOST_THREADS} at most." in page
