"""Iterations that are replayed as CUDA graphs: one launch in place of dozens, and one read on the host for several.

A graph works on the same arrays each time. What an iteration allocates while it is captured stays allocated as long as
the graph, and the graph is launched on the stream on which the solver was called, so that memory is reused in order.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .._array.base import BsrBase
from .._backend.base import Array, Backend
from .operators import Preconditioner

#: The most iterations between two reads on the host; no more than half of those that are expected, so that few are made
#: in vain. Each iteration of a batch but the last one keeps a copy of x.
MOST_AHEAD = 4
#: Iterations over which the rate of convergence is averaged.
_RATE_OVER = 4
#: The fewest iterations to come that are worth a capture, which takes the time of one to two launched iterations.
_WORTHWHILE = 4


def capturable(backend: Backend, A: Any, M: Any) -> bool:
    """Whether products with A and M may be captured: those of this package, on a card that is not capturing already.

    An operator of the user may do anything when it is called, so that it has to be called each time.
    """
    cuda = getattr(backend.xp, "cuda", None)
    if cuda is None or not hasattr(cuda.runtime, "graphLaunch") or not isinstance(A, BsrBase):
        return False
    if not (M is None or isinstance(M, BsrBase) or (isinstance(M, Preconditioner) and M._capturable)):
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
        Where the arrays live.
    wanted : bool
        Whether it is captured at all.
    """

    def __init__(self, function: Callable[[], Any], xp: Any, wanted: bool) -> None:
        self._function, self._xp = function, xp
        self._called, self._pending = False, wanted
        #: the memory that the graph works in
        self._held: list[Any] = []
        self.graph: Any = None
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
        cuda = self._xp.cuda
        home = cuda.get_current_stream()
        # What runs elsewhere must have ended: a captured launch cannot wait for an event of another stream.
        home.synchronize()  # synchronize!
        stream = cuda.Stream(non_blocking=True)
        try:
            with _memory_of(cuda, home, self._held), stream:
                stream.begin_capture()
                try:
                    self._function()
                except BaseException:
                    with contextlib.suppress(Exception):
                        stream.end_capture()
                    raise
                self.graph = stream.end_capture()
        except Exception as error:  # CUDA's, or NotImplementedError of what CuPy does not capture
            self.refusal = f"{type(error).__name__}: {error}".split("\n")[0]
            self._held.clear()


@contextlib.contextmanager
def _memory_of(cuda: Any, home: Any, held: list[Any]) -> Iterator[None]:
    """Allocate as work of the stream `home` does, and keep everything that is allocated in a list."""
    from .._kernels.workspace import owned_graph

    allocate = cuda.get_allocator()

    def keep(size: int) -> Any:
        with home:
            memory = allocate(size)
        held.append(memory)
        return memory

    with owned_graph(home), cuda.using_allocator(keep):
        yield


class Iterations:
    """Iterations of a method whose numbers decide when it ends: single ones, or some before the host looks at them.

    Parameters
    ----------
    step : callable
        One iteration. It changes ``step.x``, and leaves the numbers that decide in the array ``step.numbers``.
    backend : Backend
        Where its arrays are.
    graph : bool
        Whether iterations are captured, and made ahead.
    """

    def __init__(self, step: Any, backend: Backend, graph: bool) -> None:
        self._step, self._backend = step, backend
        self.replay = Replay(step, backend.xp, graph)
        self._numbers: Array | None = None
        self._kept: Array | None = None

    def make(self, left: Sequence[float], most: int) -> Any:
        """Make some iterations; their numbers on the host, one row for each. One read.

        Parameters
        ----------
        left : sequence of float
            By iteration, from before the first one on: how many times as large as wanted the residual is.
        most : int
            The most iterations to make.
        """
        step, xp = self._step, self._backend.xp
        expected = min(iterations_left(left), most)
        count = 1 if self.replay.graph is None else max(1, min(int(expected / 2), MOST_AHEAD))
        if count == 1:
            self.replay(expected >= _WORTHWHILE)
            return self._backend.to_host(step.numbers)[None]  # synchronize!
        if self._numbers is None or self._kept is None:
            self._numbers = xp.empty((MOST_AHEAD, *step.numbers.shape), step.numbers.dtype)
            self._kept = xp.empty((MOST_AHEAD - 1, *step.x.shape), step.x.dtype)
        for k in range(count):
            self.replay()
            self._numbers[k] = step.numbers
            if k < count - 1:
                self._kept[k] = step.x
        return self._backend.to_host(self._numbers[:count])  # synchronize!

    def take(self, k: int, count: int) -> None:
        """Let x be that after iteration k of the last `count` ones."""
        if k < count - 1:
            assert self._kept is not None
            self._step.x[...] = self._kept[k]


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
