"""A launch of products of blocks keeps the argument of its last call, and makes another one for other addresses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

from bsrgemm._kernels import graphs
from bsrgemm._products import block_products
from bsrgemm._products.arguments import BLOCK_PRODUCTS_SM80, BLOCK_PRODUCTS_SM90

from ..emulator.emulator import Array, put


@pytest.mark.parametrize("hopper", [False, True])
def test_an_argument_is_made_once_for_each_address(hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Array] = []
    counters, started = put(np.zeros(2, np.int32)), []
    monkeypatch.setattr(block_products, "cupy", SimpleNamespace(empty=lambda shape, dtype: results[-1]))
    monkeypatch.setattr(block_products, "counters", lambda count: counters)
    monkeypatch.setattr(graphs, "current", lambda: None)

    def kernel(grid: Any, threads: Any, args: Any, shared_mem: int) -> None:
        started.append(args[0])

    layout = BLOCK_PRODUCTS_SM90 if hopper else BLOCK_PRODUCTS_SM80
    launch = block_products.BlockLaunch(
        kernel, (1,), (128,), 0, (1, 16, 16), np.dtype(np.float16), bytes(layout.size), () if hopper else None, None
    )  # type: ignore[arg-type]
    for place in (0, 0, 1, 1):
        results += [put(np.zeros((1, 16, 16), np.float16))] if len(results) == place else []
        assert launch.start(()) is results[-1]
    assert started[0] is started[1] and started[2] is started[3] and started[1] is not started[2]
    for argument, out in zip(started[::2], results, strict=True):
        packed = argument.tobytes()
        assert np.frombuffer(packed, np.uint64, 1, layout.offsets["out"])[0] == out.data.ptr
        if hopper:
            assert np.frombuffer(packed, np.uint64, 1, layout.offsets["counters"])[0] == counters.data.ptr
