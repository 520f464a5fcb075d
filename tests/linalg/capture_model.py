"""A model of stream capture over the fake device, for iterations that are replayed as graphs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cupy")

from bsrgemm import linalg
from bsrgemm._kernels import driver
from bsrgemm._kernels import graphs as kernel_graphs
from bsrgemm.linalg import graphs
from bsrgemm.linalg.restarted import Space
from bsrgemm.linalg.steps import BatchConjugate, Biconjugate, Conjugate, MinimalResidual

from .. import fake_device


def refuse(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("not in a capture")


class Card:
    """Stream capture over the fake device. A graph calls the function that was captured.

    While it is captured, nothing may come to the host or go to the device, and dense products are refused as CuPy
    refuses cuBLAS. What the function computes is undone afterwards: on a card it is recorded and not run.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spoiled: bool = False) -> None:
        self.events: list[str] = []
        self.capturing, self.spoiled, self._monkeypatch = False, spoiled, monkeypatch
        self.captured: Callable[[], None] | None = None
        self.device = 0
        self.runtime = SimpleNamespace(graphLaunch=None, getDevice=lambda: self.device)
        self.home = SimpleNamespace(
            ptr=0, is_capturing=lambda: False, synchronize=lambda: self.events.append("synchronize")
        )
        for kind in (Conjugate, MinimalResidual, Biconjugate, BatchConjugate):
            monkeypatch.setattr(kind, "__call__", self._iterating(kind.__call__))
        for name in ("multiply", "orthogonalise"):
            monkeypatch.setattr(Space, name, self._iterating(getattr(Space, name)))
        monkeypatch.setattr(fake_device.xp, "cuda", self, raising=False)
        monkeypatch.setattr(kernel_graphs, "cupy", fake_device.xp)
        monkeypatch.setattr(driver, "stream_number", int)

    def _iterating(self, call: Any) -> Any:
        def iterate(step: Any, *place: int) -> None:
            if not self.capturing:
                self.events.append("step")
                return call(step, *place)
            parts = [part for x in vars(step).values() for part in (x if isinstance(x, list) else [x])]
            arrays = [x for x in parts if isinstance(x, fake_device.ndarray)]
            before = [x._memory.copy() for x in arrays]
            with self._refusals():
                call(step, *place)
            for x, memory in zip(arrays, before, strict=True):
                x._memory[...] = memory
            self.captured = lambda: call(step, *place)
            return None

        return iterate

    def happened(self) -> list[str]:
        """The events since the last time, each once."""
        found = list(dict.fromkeys(self.events))
        self.events.clear()
        return found

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        with self._monkeypatch.context() as patch:
            for name in ("get", "item", "tolist", "dot", "__bool__", "__int__", "__float__", "__matmul__"):
                patch.setattr(fake_device.ndarray, name, refuse)
            for name in ("asarray", "array", "matmul", "stack", "concatenate", "einsum"):
                patch.setattr(fake_device.xp, name, refuse, raising=False)
            patch.setattr(fake_device.FakeProducts, "multiply_dense", products_without_reads())
            yield

    def get_current_stream(self) -> Any:
        return self.home

    def Stream(self, non_blocking: bool) -> Any:
        assert non_blocking
        card = self

        class Stream(contextlib.nullcontext):  # type: ignore[type-arg]
            def begin_capture(self) -> None:
                card.events.append("begin")
                card.capturing = True

            def end_capture(self) -> Any:
                card.events.append("end")
                card.capturing = False
                if card.spoiled:
                    raise RuntimeError("cudaErrorStreamCaptureInvalidated\nand more")
                return Graph(card.events, card.captured)

        return Stream()


class Graph:
    """Computes what was captured, on the same arrays."""

    def __init__(self, events: list[str], function: Any) -> None:
        self._events, self._function = events, function

    def launch(self) -> None:
        self._events.append("launch")
        self._function()


def products_without_reads() -> Any:
    """The fake device fetches a matrix for a product, which a card does not: that read is allowed."""
    get, multiply = fake_device.ndarray.__dict__["get"], fake_device.FakeProducts.multiply_dense
    original = ORIGINAL_GET

    def call(self: Any, product: Any) -> Any:
        fake_device.ndarray.get = original  # type: ignore[method-assign]
        try:
            return multiply(self, product)
        finally:
            fake_device.ndarray.get = get  # type: ignore[method-assign]

    return call


ORIGINAL_GET = fake_device.ndarray.get


@pytest.fixture(autouse=True)
def told() -> Any:
    """A solver that fails must be expected to. Graphs of this model hold their operands, so they are dropped."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", linalg.SolverWarning)
        yield
    graphs._graphs.clear()
