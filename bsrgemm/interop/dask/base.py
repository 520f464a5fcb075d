"""The base class of Dask arrays whose chunks are matrices: how they are made, computed, persisted and pickled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph
from dask.task_spec import List, Task, TaskRef
from dask.tokenize import tokenize

from ..._backend.registry import by_name
from ...bsr import bsr_array
from . import tasks
from .tasks import Layout

if da.array_expr_enabled():
    raise ImportError(
        "bsrgemm.interop.dask: does not work with Dask's query planning for arrays; "
        "dask.config.set({'array.query-planning': False}) before dask.array is imported"
    )

#: A sum of many parts is a tree in which each task adds up so many.
_PARTS_PER_SUM = 8


class PanelBase(da.Array):
    """A matrix in panels: a graph, the name of its tasks, and the layout of the panels."""

    __slots__ = ("_layout",)
    _layout: Layout

    def __new__(cls, graph: Any, name: str, layout: Layout) -> Self:
        self: Self = super().__new__(cls, graph, name, layout.chunks, meta=empty_panel(layout))
        self._layout = layout
        return self

    @classmethod
    def _of_tasks(
        cls, name: str, layout: Layout, task: Callable[[Any, int], Task], sources: Sequence[Any] = ()
    ) -> Self:
        """A matrix of which ``task(key, i)`` makes panel i, from these collections."""
        keys = [layout.key(name, i) for i in range(layout.count)]
        layer = {key: task(key, i) for i, key in enumerate(keys)}
        return cls(HighLevelGraph.from_collections(name, layer, dependencies=sources), name, layout)

    def __reduce__(self) -> Any:
        return type(self), (self.dask, self.name, self._layout)

    def __dask_postcompute__(self) -> Any:
        return partial(tasks.together, axis=self._layout.axis), ()

    def __dask_postpersist__(self) -> Any:
        return self._rebuild, ()

    def _rebuild(self, graph: Any, *, rename: Any = None) -> Self:
        name: str = self.name
        return type(self)(graph, rename.get(name, name) if rename else name, self._layout)

    def copy(self) -> Self:
        """Return a matrix with the same graph, whose panels are not computed twice.

        Returns
        -------
        PanelArray
            The copy.

        Examples
        --------
        >>> import bsrgemm as bg
        >>> from bsrgemm.interop import dask as panels
        >>> A = panels.from_bsr(bg.eye(4, blocksize=(2, 2)), 2)
        >>> A.copy().name == A.name
        True
        """
        return type(self)(self.dask, self.name, self._layout)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def _with_axis(self, axis: int) -> Self:
        """The same single panel, seen as cut along the other axis; its key is the same."""
        layout = self._layout
        if axis == layout.axis:
            return self
        (side,) = layout.sides
        other = Layout((layout.across,), side, layout.blocksize, layout.dtype, layout.device, axis)
        return type(self)(self.dask, self.name, other)

    def _transposed(self) -> Self:
        layout = self._layout.transposed()
        return self._map("bsr-transpose", None, layout, lambda key, i, panel: Task(key, tasks.transposed, panel))

    def _refs(self) -> list[TaskRef]:
        return [TaskRef(self._layout.key(self.name, i)) for i in range(self._layout.count)]

    def _map(
        self, prefix: str, token: Any, layout: Layout, task: Callable[..., Any], others: Sequence[Any] = ()
    ) -> Self:
        """A matrix of as many panels; ``task(key, i, *panels)`` makes the task of panel i."""
        name = f"{prefix}-{tokenize(self.name, [other.name for other in others], token, layout)}"
        matrices: tuple[Any, ...] = (self, *others)
        columns = [matrix._refs() for matrix in matrices]
        return self._of_tasks(name, layout, lambda key, i: task(key, i, *(refs[i] for refs in columns)), matrices)


def empty_panel(layout: Layout) -> Any:
    """Return what Dask calls the meta of an array: a panel without elements."""
    panel = bsr_array((0, 0), dtype=layout.dtype, blocksize=layout.blocksize)
    try:
        return panel.to_device(layout.device)
    except (ImportError, RuntimeError):  # the workers have a GPU, and the client may have none
        return panel


def empty_dense(device: str, ndim: int, dtype: np.dtype[Any]) -> Any:
    """Return the meta of a dense array on a device."""
    try:
        xp = by_name(device).xp
        return xp.empty((0,) * ndim, dtype=dtype)
    except (ImportError, RuntimeError):  # as above
        return np.empty((0,) * ndim, dtype=dtype)


def tree_sum(name: str, key: Any, parts: Iterable[TaskRef], dtypes: tuple[Any, Any]) -> dict[Any, Task]:
    """Return tasks that add up `parts`, the last of which is `key`. Sums are kept in the first of two dtypes.

    The order is that of the parts and does not depend on when they are ready, so the same graph gives the same bits.
    """
    found: dict[Any, Task] = {}
    level, depth = list(parts), 0
    inner, final = dtypes
    while len(level) > _PARTS_PER_SUM:
        groups = [level[i : i + _PARTS_PER_SUM] for i in range(0, len(level), _PARTS_PER_SUM)]
        level = []
        for i, group in enumerate(groups):
            inner_key = (f"{name}-sum", depth, i, *key[1:])
            found[inner_key] = Task(inner_key, tasks.added, List(*group), dtype=inner)
            level.append(TaskRef(inner_key))
        depth += 1
    found[key] = Task(key, tasks.added, List(*level), dtype=final)
    return found
