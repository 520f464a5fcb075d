"""What a run shows: a table that grows and a bar on a terminal, a line for each row elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from .cells import TITLES, Row, cells, columns, remarks

_NAME_WIDTH = 58


def _named(head: str, text: str) -> str:
    """A cell that stands without its head.

    >>> _named("time", "1.02 ms"), _named("spread", "0.4%"), _named("cuBLAS", "1.07 x")
    ('1.02 ms', '+- 0.4%', '1.07 x cuBLAS')
    """
    if head in ("time", "rate"):
        return text
    return f"+- {text}" if head == "spread" else f"{text} {head}"


class Lines:
    """One line for each row, as it comes."""

    def __init__(self) -> None:
        self._group = ""

    def note(self, text: str) -> None:
        print(text, flush=True)

    def doing(self, name: str, text: str = "") -> None:
        """Print nothing, because a log should contain results only."""

    def row(self, rows: Sequence[Row]) -> None:
        row = rows[-1]
        heads = columns([row])
        if row["group"] != self._group:
            self._group = row["group"]
            print(f"\n{TITLES[self._group]}", flush=True)
        first, *rest = cells(row, heads)
        named = (_named(head, text) for head, text in zip(heads[1:], rest, strict=True) if text)
        print(f"  {first:{_NAME_WIDTH}} {' | '.join(named)}", flush=True)

    def end(self, rows: Sequence[Row]) -> None:
        for text in remarks(rows):
            print(f"- {text}")


class Live:
    """Tables and a bar of progress in place, by rich."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console()
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=self._console,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=total)
        self._notes: list[str] = []
        self._rows: Sequence[Row] = ()
        self._live = Live(self._progress, console=self._console, refresh_per_second=4, vertical_overflow="visible")

    def __enter__(self) -> Live:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.update(self._tables(), refresh=True)
        self._live.stop()

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def doing(self, name: str, text: str = "") -> None:
        self._progress.update(self._task, description=f"{name}: {text}" if text else name)

    def row(self, rows: Sequence[Row]) -> None:
        from rich.console import Group

        self._rows = rows
        self._progress.advance(self._task)
        self._live.update(Group(self._tables(), self._progress))

    def _tables(self) -> Any:
        from rich.console import Group

        groups = dict.fromkeys(row["group"] for row in self._rows)
        return Group(*(rich_table([row for row in self._rows if row["group"] == group]) for group in groups))

    def end(self, rows: Sequence[Row]) -> None:
        for text in remarks(rows):
            self.note(f"- {text}")


def rich_table(rows: Sequence[Row]) -> Any:
    """The rows of one group; ratios below 1, where a peer is faster, stand out."""
    from rich.table import Table
    from rich.text import Text

    heads = columns(rows)
    table = Table(title=TITLES[rows[0]["group"]], title_justify="left", title_style="bold")
    for head in heads:
        table.add_column(head, justify="left" if not head else "right", overflow="fold")
    for row in rows:
        line = []
        for head, text in zip(heads, cells(row, heads), strict=True):
            ratio = row["peers"].get(head, {}).get("ratio")
            style = "bold red" if text.startswith("WRONG") else "green" if ratio and ratio >= 1 else ""
            line.append(Text(text, style="yellow" if ratio and ratio < 1 else style))
        table.add_row(*line)
    return table


@contextlib.contextmanager
def screen(total: int) -> Iterator[Lines | Live]:
    """The kind of screen that suits the output: a terminal or a file."""
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError), Live(total) as live:
            yield live
            return
    yield Lines()
