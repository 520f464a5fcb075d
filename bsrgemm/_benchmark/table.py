"""Lines printed as they are measured, and kept for a file of results."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from . import machine, provenance, results

#: The files that the tables are made from, in a checkout
RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


class Table:
    """Lines printed as they come (in colour where rich is installed), with the kernels that each row launched.

    `launched` is what `provenance.recording` gives; without it rows name no kernels.
    """

    def __init__(self, name: str, title: str, launched: provenance.Launched | None = None) -> None:
        self.name = name
        self.rows: list[dict[str, Any]] = []
        self._launched = launched
        #: whether rows replace those of the same problems in an existing file, whose other rows stay
        self.merge = False
        self._print: Callable[..., Any]
        try:
            from rich.console import Console

            self._print = partial(Console(highlight=True, width=120, soft_wrap=True).print, markup=False)
        except ImportError:
            self._print = print
        self._print(f"{title} on {machine.describe().get('card', 'the CPU')}")

    def note(self, text: str) -> None:
        """Print a line without storing a row."""
        self.progress("")
        self._print(text.rstrip())

    def add(self, text: str, **values: Any) -> None:
        """Print a line and store its row."""
        self.note(text)
        self.keep(values)

    def keep(self, row: dict[str, Any]) -> None:
        """Store a row without printing a line."""
        if self._launched is not None:
            row["kernels"] = self._launched.take()
        self.rows.append(row)

    def forget_launches(self) -> None:
        """Forget the kernels that were launched so far to compile them; they belong to no row."""
        if self._launched is not None:
            self._launched.take()

    def progress(self, text: str) -> None:
        """What is being measured, on a terminal alone; the next line replaces it."""
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def found(self) -> dict[str, Any]:
        """Everything that a file of results holds."""
        return {"machine": machine.describe(), **provenance.commit(), "rows": self.rows}

    def write(self, cut: str | None = None) -> Path:
        """Write bench/results/<name>.json and say where; `cut` is why rows are missing."""
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.name}.json"
        found = self.found()
        if self.merge and path.is_file():
            found = results.merged(json.loads(path.read_text(encoding="utf-8")), found)
        results.write(path, found | ({} if cut is None else {"cut": cut}))
        self._print(f"written: bench/results/{path.name}{'' if cut is None else ', in part'}")
        return path


@contextlib.contextmanager
def writing(table: Table, keep: bool = True) -> Iterator[None]:
    """Write the table's file after this block, also when it fails or is stopped (SIGTERM is what `timeout` sends)."""

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
