"""What solvers capture and launch on a fake card, whose graphs hold addresses and keep no array."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("cupy")

from bsrgemm import linalg
from bsrgemm.linalg import graphs
from bsrgemm.linalg.restarted import Space
from bsrgemm.linalg.steps import BatchConjugate, Biconjugate, Conjugate, MinimalResidual

from .. import fake_cupy


def refuse(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("not in a capture")


class Card:
    """From here on iterations are captured, and the card tells what happens to them.

    Parameters
    ----------
    spoiled : bool
        Whether captures end with an error of CUDA.
    refused : bool
        Whether CuPy refuses a call in each capture.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spoiled: bool = False, refused: bool = False) -> None:
        self.events: list[str] = []
        self.capturing, self._spoiled, self._refused, self._monkeypatch = False, spoiled, refused, monkeypatch
        cuda: Any = fake_cupy.xp.cuda  # type: ignore[attr-defined]
        self._runtime = cuda.runtime
        # A CuPy without it has no graphs, and solvers make each iteration by calls.
        monkeypatch.setattr(self._runtime, "graphLaunch", None, raising=False)
        for kind in (Conjugate, MinimalResidual, Biconjugate, BatchConjugate):
            monkeypatch.setattr(kind, "__call__", self._iterating(kind.__call__))
        for name in ("multiply", "orthogonalise"):
            monkeypatch.setattr(Space, name, self._iterating(getattr(Space, name)))
        self._noting(cuda.Stream, "synchronize", "synchronize")
        self._noting(cuda.Stream, "begin_capture", "begin")
        self._noting(cuda.Stream, "end_capture", "end")
        self._noting(cuda.Graph, "launch", "launch")

    def _iterating(self, call: Any) -> Any:
        def iterate(step: Any, *place: int) -> None:
            if not self.capturing:
                self.events.append("step")
            elif self._refused:
                refuse()
            call(step, *place)

        return iterate

    def _noting(self, kind: Any, name: str, event: str) -> None:
        """Note the calls that solvers make of a method."""
        was = getattr(kind, name)

        def call(x: Any, *args: Any, **options: Any) -> Any:
            found = was(x, *args, **options)
            if sys._getframe(1).f_code.co_filename == graphs.__file__:
                self.events.append(event)
                self.capturing = event == "begin" or (self.capturing and event != "end")
                if event == "end" and self._spoiled:
                    raise RuntimeError("cudaErrorStreamCaptureInvalidated\nand more")
            return found

        self._monkeypatch.setattr(kind, name, call)

    def happened(self) -> list[str]:
        """The events since the last time, each once."""
        found = list(dict.fromkeys(self.events))
        self.events.clear()
        return found

    @contextlib.contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Inside, iterations are called; graphs that are kept stay."""
        with self._monkeypatch.context() as patch:
            patch.delattr(self._runtime, "graphLaunch")
            yield


def may_be_captured_in_a_capture(A: Any) -> bool:
    """Whether a solver would capture its iterations while the current stream is being captured."""
    with fake_cupy.xp.cuda.Stream() as stream:  # type: ignore[attr-defined]
        stream.begin_capture()
        found = graphs.capturable(fake_cupy.backend(), A, None)
        stream.end_capture()
    return found


@pytest.fixture(autouse=True)
def told() -> Any:
    """A solver that fails must be expected to."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", linalg.SolverWarning)
        yield
    graphs._graphs.clear()
