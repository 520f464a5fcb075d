"""A driver of streams and graphs where there is no card, for everything that launches kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from bsrgemm._kernels import driver, graphs, workspace


class Driver:
    """Streams, each with its address as its number, which record the graph number 1 unless they are told another."""

    def __init__(self) -> None:
        #: by the address of a stream: the number of the graph that it records
        self.recording: dict[int, int] = {}
        #: graphs whose capture an error has ended
        self.broken: set[int] = set()
        #: graphs that are gone
        self.gone: set[int] = set()

    def recorded(self, stream: int) -> driver.Recorded:
        number = self.recording.get(stream, 1)
        return driver.Recorded(number, 0 if number in self.broken else number)

    def signal(self, graph: int) -> Any:
        assert graph, "nobody can wait for the end of a graph that is none"
        return SimpleNamespace(given=lambda: graph in self.gone)


@contextmanager
def driven(cupy: Any) -> Iterator[Driver]:
    """Launches ask this driver and this stand-in for CuPy; they find no counters and no captures of others."""
    found = Driver()
    with (
        patch.multiple(driver, stream_number=int, recorded=found.recorded, Signal=found.signal),
        patch.multiple(graphs, cupy=cupy, _captures={}, _reserves={}),
        patch.multiple(workspace, cupy=cupy, _zeroed={}),
    ):
        yield found
