"""Iterations that are replayed as CUDA graphs: one launch in place of dozens, and one read on the host for several.

A graph works on the same arrays each time. What an iteration allocates while it is captured is memory of the graph. It
is kept for the next solve with the same operands, until its preconditioner, or the matrix if there is none, is deleted.
"""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import numpy as np

from .._array.base import BsrBase
from .._backend.base import Array, Backend
from .._batch import bsr_batch
from .._products.engine import ENGINES, reference
from .operators import Preconditioner

#: The most iterations between two reads on the host; no more than half of those that are expected, so that few are made
#: in vain. Each iteration of a batch but the last one keeps a copy of x.
MOST_AHEAD = 4
#: Iterations over which the rate of convergence is averaged.
_RATE_OVER = 4
#: The fewest iterations to come that are worth a capture, which takes the time of one to two launched iterations.
WORTHWHILE = 4


def capturable(backend: Backend, A: Any, M: Any) -> bool:
    """Whether products with A and M may be captured: those of this package, on a card that is not capturing already.

    An operator of the user may do anything when it is called, so that it has to be called each time.
    """
    cuda = getattr(backend.xp, "cuda", None)
    if cuda is None or not hasattr(cuda.runtime, "graphLaunch") or not isinstance(A, BsrBase | bsr_batch):
        return False
    if not (M is None or isinstance(M, BsrBase | bsr_batch) or (isinstance(M, Preconditioner) and M._capturable)):
        return False
    return not cuda.get_current_stream().is_capturing()


class Replay:
    """A function without arguments that always works on the same arrays: a CUDA graph as soon as that is worthwhile.

    The first call is the function's own, since nothing may be compiled while it is captured. Should the capture fail,
    the function is called each time, and `refusal` says why.

    Parameters
    ----------
    function : callable
        It may not wait for the GPU, nor change anything but its arrays: to capture it is to call it.
    xp : module
        Where the arrays live; only CuPy has graphs.
    wanted : bool
        Whether it is captured at all.
    captured : Graph, optional
        A CUDA graph of the function, on the same arrays, which is launched from the first call on.
    called : bool
        Whether an earlier solve has called the function already.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        xp: Any,
        wanted: bool = True,
        captured: Any = None,
        called: bool = False,
    ) -> None:
        self._function, self._xp = function, xp
        self._called, self._pending = called, wanted and captured is None and hasattr(xp, "cuda")
        #: the CUDA graph, or None if there is none yet
        self.graph = captured
        self.refusal: str | None = None

    def __call__(self, worthwhile: bool = True) -> None:
        if self._called and self._pending and worthwhile:
            self._capture()
        if self.graph is None:
            self._function()
            self._called = True
        else:
            self.graph.launch()

    def _capture(self) -> None:
        """Capture the function; that computes nothing."""
        self._pending = False
        from .._kernels import graphs

        cuda = self._xp.cuda
        # What runs elsewhere must have ended: a captured launch cannot wait for an event of another stream.
        cuda.get_current_stream().synchronize()  # synchronize!
        stream = cuda.Stream(non_blocking=True)
        try:
            with stream:
                stream.begin_capture()
                try:
                    with graphs.memory():
                        self._function()
                except BaseException:
                    with contextlib.suppress(Exception):
                        stream.end_capture()
                    raise
                self.graph = stream.end_capture()
        # CUDA's errors, NotImplementedError of what CuPy does not capture, or memory that is not there
        except (RuntimeError, MemoryError) as error:
            self.refusal = f"{type(error).__name__}: {error}".split("\n")[0]


# ------------------------------------------------------------------------- graphs that are kept between solves
@dataclass
class _Kept:
    """What was captured in an earlier solve, and the arrays that it works on."""

    #: a graph, or several by what they compute
    captured: Any
    #: by name: arrays, or lists of them
    arrays: dict[str, Any]
    #: what the launches depend on: the description of the call, and what products with its matrices were prepared for
    described: Any
    prepared: list[Any]
    #: how many iterations the last solve has made
    made: int
    #: drops this object when its owner is deleted
    owner: Any = field(repr=False)


#: One graph for each preconditioner or matrix that has been solved with, by its id. A solve takes it out as long as it
#: lasts: two threads never work on the same arrays.
_graphs: dict[int, _Kept] = {}


class _Same:
    """An object that is equal to itself alone, also after it was deleted."""

    def __init__(self, x: Any) -> None:
        self._reference = reference(x)

    def __eq__(self, other: object) -> bool:
        found = self._reference()
        return isinstance(other, _Same) and found is not None and found is other._reference()

    __hash__ = None  # type: ignore[assignment]


def _described(x: Any, matrices: list[Any]) -> Any:
    """Return an object that is equal to that of another operand with the same parts; its matrices go into a list.

    The parts of preconditioners and of their levels and smoothers are looked at one by one.
    """
    if isinstance(x, BsrBase | bsr_batch):
        matrices.append(x._whole if isinstance(x, bsr_batch) else x)
        return type(x)
    if x is None or isinstance(x, numbers.Number | str | np.dtype):
        return x
    if isinstance(x, list | tuple):
        return [_described(part, matrices) for part in x]
    if isinstance(x, dict):
        return {name: _described(part, matrices) for name, part in x.items()}
    if isinstance(x, Preconditioner) or type(x).__module__.startswith(__package__):
        return [type(x), _described(vars(x), matrices)]
    return _Same(x)


class Place:
    """Where the graphs of a solve stay until the next one: with its preconditioner, or with the matrix without one.

    The launches of an iteration depend on the method, the shape and the dtype of its vectors, the device and the
    stream, and of A and M on all matrices with their arrays and plans, and on all numbers that a launch takes from the
    host. No part of A and M is kept alive by what is remembered of them.

    Parameters
    ----------
    kind : object
        What is captured. It is equal for two solves whose iterations make the same launches on the same operands.
    system : object
        Its `backend` and `b` are those of the system.
    operands : tuple
        The matrix, and the preconditioner or None.
    graph : bool
        Whether there may be a graph at all.
    """

    def __init__(self, kind: Any, system: Any, operands: tuple[Any, Any], graph: bool) -> None:
        self._owner = operands[0] if operands[1] is None else operands[1]
        self._engine, self._matrices = ENGINES.of(system.backend), list[Any]()
        #: what an earlier solve has left, if its graphs hold for this one
        self.kept: _Kept | None = None
        #: how many iterations this solve has made
        self.made = 0
        if not graph:
            return
        from .._kernels import driver

        cuda, b = system.backend.xp.cuda, system.b
        where = system.backend.name, cuda.runtime.getDevice(), driver.stream_number(cuda.get_current_stream().ptr)
        self._described = kind, tuple(b.shape), b.dtype, where, _described(operands, self._matrices)
        kept = _graphs.pop(id(self._owner), None)
        if kept is None or kept.described != self._described:
            return
        if all(before.holds_for(A) for before, A in zip(kept.prepared, self._matrices, strict=True)):
            self.kept = kept

    def leave(self, captured: Any, arrays: dict[str, Any]) -> None:
        """Keep graphs and their arrays for the next solve."""
        key, graphs = id(self._owner), _graphs

        def drop(_: Any) -> None:
            graphs.pop(key, None)

        prepared = list(map(self._engine.prepared, self._matrices)) if self.kept is None else self.kept.prepared
        owner = ref(self._owner, drop)
        _graphs[key] = _Kept(captured, arrays, self._described, prepared, self.made, owner)

    def expected(self, left: Sequence[float], most: int) -> float:
        """Return how many iterations are still to be expected, no more than `most`.

        At first there is no rate of convergence yet, but the last solve with these operands may have told.
        """
        return min(iterations_left(left) if self.kept is None or self.made else self.kept.made, most)


def ahead(replay: Replay, coming: float) -> int:
    """How many iterations are made before the host looks, if so many are expected: only one without a graph."""
    return 1 if replay.graph is None else max(1, min(int(coming / 2), MOST_AHEAD))


class Iterations:
    """Iterations of a method whose numbers decide when it ends: single ones, or some before the host looks at them.

    Parameters
    ----------
    kind : class
        That of `steps.Step`: ``step = kind(system, arrays)`` makes an iteration each time it is called. All that it
        needs from one to the next are its attributes that are arrays. An earlier step may have left them.
    system : object
        Its `backend`, `b` and `x` are those of the system. ``system.x`` becomes the array of the step.
    operands : tuple
        The matrix, and the preconditioner or None.
    graph : bool
        Whether iterations are captured, and made ahead.
    """

    def __init__(self, kind: type[Any], system: Any, operands: tuple[Any, Any], graph: bool) -> None:
        self._backend = backend = system.backend
        self._place = Place(kind, system, operands, graph)
        kept = self._place.kept
        self.step = kind(system, None if kept is None else kept.arrays)
        self.replay = Replay(self.step, backend.xp, graph, None if kept is None else kept.captured)
        self._numbers: Array | None = None
        self._copies: Array | None = None

    def make(self, left: Sequence[float], most: int) -> Any:
        """Make some iterations; their numbers on the host, one row for each. One read.

        Parameters
        ----------
        left : sequence of float
            By iteration, from before the first one on: how many times as large as wanted the residual is.
        most : int
            The most iterations to make.
        """
        step, xp = self.step, self._backend.xp
        coming = self._place.expected(left, most)
        count = ahead(self.replay, coming)
        self._place.made += count
        if count == 1:
            self.replay(coming >= WORTHWHILE)
            return self._backend.to_host(step.numbers)[None]  # synchronize!
        if self._numbers is None:
            self._numbers = xp.empty((MOST_AHEAD, *step.numbers.shape), step.numbers.dtype)
            if not step.stays:
                self._copies = xp.empty((MOST_AHEAD - 1, *step.x.shape), step.x.dtype)
        for k in range(count):
            self.replay()
            self._numbers[k] = step.numbers
            if k < count - 1 and self._copies is not None:
                self._copies[k] = step.x
        return self._backend.to_host(self._numbers[:count])  # synchronize!

    def take(self, k: int, count: int) -> None:
        """Let x be that after iteration k of the last `count` ones."""
        if k < count - 1:
            assert self._copies is not None
            self.step.x[...] = self._copies[k]

    def end(self) -> Array:
        """Return x, and keep the graph, if there is one, for the next solve."""
        x, captured = self.step.x, self.replay.graph
        if captured is None:
            return x
        arrays = {name: part for name, part in vars(self.step).items() if self._backend.is_dense(part)}
        self._place.leave(captured, arrays)
        return x.copy()


def iterations_left(left: Sequence[float]) -> float:
    """The number of iterations to expect, by the rate of the last ones; infinity if they bring nothing.

    Parameters
    ----------
    left : sequence of float
        By iteration, how many times as large as wanted the residual is.
    """
    recent = left[-_RATE_OVER - 1 :]
    if recent[-1] <= 1:
        return 0.0
    if not (np.isfinite(recent).all() and recent[0] > recent[-1]):
        return math.inf
    rate = math.log(recent[0] / recent[-1]) / (len(recent) - 1)
    return math.log(recent[-1]) / rate
