"""Calls that are made again: many times, on several streams, with delays inside of the kernel, in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bsrgemm._kernels.jit import KernelSpec


def differing(call: Callable[[], Any], first: Any, times: int) -> int:
    """In how many bytes the results of so many calls differ from the first one."""
    import cupy

    count = cupy.zeros((), np.int64)
    for _ in range(times):
        count += (call().view(np.uint8) != first.view(np.uint8)).sum()
    return int(count)


def new_stream() -> Any:
    """A stream that waits for no other. What has been computed so far is there."""
    import cupy

    cupy.cuda.Device().synchronize()
    return cupy.cuda.Stream(non_blocking=True)


def on_streams(call: Callable[[], Any], times: int) -> list[Any]:
    """What so many calls return on each of three streams that do not wait for each other."""
    import cupy

    streams = [new_stream() for _ in range(3)]
    results: list[Any] = []
    for _ in range(times):
        for stream in streams:
            with stream:
                results.append(call())
    cupy.cuda.Device().synchronize()
    return results


def delay(config: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the waits of this config's kernels take longer, each by another time."""
    plain = config.spec

    def delayed(one: Any) -> KernelSpec:
        spec: KernelSpec = plain(one)
        return replace(spec, defines=(*spec.defines, ("STRESS", 1)))

    monkeypatch.setattr(config, "spec", delayed)


# ------------------------------------------------------------------------------------------------- graphs
def captured(stream: Any, call: Callable[[], Any]) -> Any:
    """The launches of a call on the current stream, as a graph. The call was made before: nothing is compiled now."""
    stream.synchronize()
    stream.begin_capture()
    call()
    return stream.end_capture()


def bystanders(sizes: Iterable[int]) -> list[Any]:
    """Arrays of so many bytes.

    They may lie in memory that a call took and gave back during its capture: the graph must not write there.
    """
    import cupy

    return [cupy.full(n, 7, np.int8) for n in sizes]


def intact(arrays: list[Any]) -> bool:
    """Has nobody written to these bystanders?"""
    return all(bool((x == 7).all()) for x in arrays)
