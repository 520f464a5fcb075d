"""What these scripts share: one aligned line per case, JSON with the machine inside."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from bsrgemm._benchmark.machine import has_gpu, machine

RESULTS = Path(__file__).parent / "results"


def on_gpu() -> bool:
    """Are things measured on the card? (Tests say no by replacing `has_gpu`.)"""
    return has_gpu()


class Table:
    """Lines printed as they come (in colour where rich is installed), kept for the JSON."""

    def __init__(self, name: str, title: str) -> None:
        self.name = name
        self.rows: list[dict[str, Any]] = []
        self._print: Callable[..., Any]
        try:
            from rich.console import Console

            self._print = partial(Console(highlight=True, width=120, soft_wrap=True).print, markup=False)
        except ImportError:
            self._print = print
        self._print(f"{title} on {machine().get('card', 'the CPU')}")

    def note(self, text: str) -> None:
        """A line for the reader alone."""
        self.progress("")
        self._print(text.rstrip())

    def add(self, text: str, **values: Any) -> None:
        self.note(text)
        self.rows.append(values)

    def progress(self, text: str) -> None:
        """What is being measured, on a terminal alone; the next line replaces it."""
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def write(self, cut: str | None = None) -> Path:
        """Write bench/results/<name>.json and say where; `cut` is why rows are missing."""
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.name}.json"
        about = {"machine": machine(), "rows": self.rows} | ({} if cut is None else {"cut": cut})
        whole = path.with_suffix(".tmp")
        whole.write_text(json.dumps(about, indent=1) + "\n")
        whole.replace(path)  # all of it or nothing, also over a file that may not be written
        self._print(f"written: bench/results/{path.name}{'' if cut is None else ', in part'}")
        return path


@contextlib.contextmanager
def writing(table: Table, keep: bool = True) -> Iterator[None]:
    """Write the table's file behind this block, also when it fails or is stopped (SIGTERM is what `timeout` sends)."""

    def stop(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    cut: str | None = None
    try:
        yield
    except BaseException as error:
        cut = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
        raise
    finally:
        if keep and (table.rows or cut is None):
            table.write(cut and cut.split("\n")[0])
        signal.signal(signal.SIGTERM, before)
