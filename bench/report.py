"""Columns, and the one writer of tables: aligned lines on the screen, Markdown, and JSON."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FORMAT = 2


def three(value: float | None) -> str:
    """Three significant digits.

    >>> three(717.4), three(0.07446), three(12.345), three(2968.1), three(1.0), three(None), three(float("nan"))
    ('717', '0.0745', '12.3', '2,970', '1.00', '', 'nan')
    """
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = int(f"{abs(value):.2e}".partition("e")[2])
    return f"{round(value, 2 - exponent):,.{max(0, 2 - exponent)}f}"


def duration(seconds: float | None) -> str:
    """Three digits and a unit.

    >>> duration(0.00041249), duration(3.2e-5), duration(12.3456)
    ('0.412 ms', '32.0 us', '12.3 s')
    """
    if seconds is None:
        return ""
    unit, scale = next((u, s) for u, s in (("s", 1.0), ("ms", 1e3), ("us", 1e6)) if seconds * s >= 0.1 or u == "us")
    return f"{three(seconds * scale)} {unit}"


def rate(value: float | None, unit: str = "FLOP/s") -> str:
    """Operations or bytes in a second.

    >>> rate(8.134e10), rate(9.89e14), rate(4.1e12, "B/s")
    ('81.3 GFLOP/s', '989 TFLOP/s', '4.10 TB/s')
    """
    if value is None:
        return ""
    return f"{three(value / 1e12)} T{unit}" if value >= 1e12 else f"{three(value / 1e9)} G{unit}"


bandwidth = partial(rate, unit="B/s")


def times(ratio: float | None) -> str:
    """How many times as long a peer takes."""
    return "" if ratio is None else f"{ratio:.{2 if ratio < 10 else 1 if ratio < 1000 else 0}f} x"


def error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


@dataclass(frozen=True)
class Column:
    """A heading, and what stands under it for a row; a column without any text is left out."""

    head: str
    cell: Callable[[Row], str]


@dataclass(frozen=True)
class Peers:
    """A column for each peer that occurs in the rows."""

    cell: Callable[[Row, Row], str] = lambda row, peer: times(peer.get("ratio"))

    def columns(self, rows: Sequence[Row]) -> list[Column]:
        names = dict.fromkeys(name for row in rows for name in row.get("peers", {}))
        return [self._column(name) for name in names]

    def _column(self, name: str) -> Column:
        def cell(row: Row) -> str:
            found = row.get("peers", {}).get(name)
            if found is None or "without" in found:
                return ""
            return next((why for why in ("wrong", "failed") if why in found), "") or self.cell(row, found)

        return Column(name, cell)


Columns = Sequence[Column | Peers]


def field(head: str, name: str, shown: Callable[[Any], str] = three, scale: float = 1.0) -> Column:
    """A column with a number of the rows."""

    def cell(row: Row) -> str:
        value = row.get(name)
        return "" if value is None else shown(value * scale if scale != 1 else value)

    return Column(head, cell)


def _per_second(name: str, shown: Callable[[float | None], str]) -> Callable[[Row], str]:
    return lambda row: shown(row[name] / row["seconds"]) if row.get("seconds") and row.get(name) else ""


TIME = field("time", "seconds", duration)
RATE = Column("rate", _per_second("flops", rate))
BANDWIDTH = Column("bytes", _per_second("moved", bandwidth))
ROOF = field("of the roof", "roof", lambda share: f"{share:.0%}")
BACK_TO_BACK = Column("back to back", lambda row: rate(row["flops"] / row["sustained"]) if row.get("sustained") else "")
BACK_TO_BACK_PEER = Column("best peer back to back", lambda row: _sustained_peer(row))
USUAL: Columns = (TIME, RATE, ROOF, Peers(), BACK_TO_BACK, BACK_TO_BACK_PEER)


def _sustained_peer(row: Row) -> str:
    """The fastest of the peers when calls follow each other, in times of ours."""
    taken = [peer["sustained"] for peer in row.get("peers", {}).values() if peer.get("sustained")]
    return times(min(taken) / row["sustained"]) if taken and row.get("sustained") else ""


def status(row: Row) -> str | None:
    """Why there is no number, or None."""
    if row.get("wrong"):
        return f"WRONG: {three(row.get('error'))} times what rounding explains"
    return f"failed: {row['failed']}" if row.get("failed") else None


def table(columns: Columns, rows: Sequence[Row], what: str = "") -> list[list[str]]:
    """Headings and cells, as text. What could not be measured says why in its second cell."""
    single = [c for column in columns for c in (column.columns(rows) if isinstance(column, Peers) else [column])]
    lines = [[row["what"], *((c.cell(row) if status(row) is None else "") for c in single)] for row in rows]
    kept = [0, *(k for k in range(1, len(single) + 1) if any(line[k] for line in lines))]
    kept = kept if len(kept) > 1 else [0, 1]
    found = [[what, *(single[k - 1].head for k in kept[1:])]]
    for row, line in zip(rows, lines, strict=True):
        cells = [line[k] for k in kept]
        found.append([cells[0], status(row) or cells[1], *cells[2:]])
    return found


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    head, *body = lines
    ruler = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in [head, ruler, *body])


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """The same as text for a terminal."""
    widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            c.ljust(w) if k == 0 else c.rjust(w) for k, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def line(columns: Columns, row: Row, width: int = 60) -> str:
    """One row by itself: each cell with its heading."""
    (_, *heads), (what, *cells) = table(columns, [row])
    named = [cell if head in ("time", "rate", "bytes", "") or status(row) else f"{head} {cell}"
             for head, cell in zip(heads, cells, strict=True) if cell]  # fmt: skip
    return f"  {what:{width}} {' | '.join(named)}"


def remarks(rows: Iterable[Row]) -> list[str]:
    """Peers that failed, were wrong or do not serve a row, each reason once."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for name, peer in row.get("peers", {}).items():
            for kind in ("failed", "wrong"):
                if kind in peer:
                    found.setdefault(f"{name} {kind}: {peer[kind]}", []).append(row["what"])
    return [f"{what} ({where[0]}{f' and {len(where) - 1} more' * (len(where) > 1)})" for what, where in found.items()]


def write(path: Path, found: dict[str, Any]) -> None:
    """Write the whole file or nothing; an existing file is replaced."""
    whole = path.with_name(f".{path.name}.tmp")
    whole.write_text(json.dumps({"format": FORMAT} | found, indent=1) + "\n", encoding="utf-8")
    whole.replace(path)


def read(path: Path) -> dict[str, Any]:
    """Read a file that `write` wrote; ValueError with the reason for any other file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as reason:
        raise ValueError(f"{path}: {reason}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("rows"), list):
        raise ValueError(f"{path}: expected results of `python -m bench`, format {FORMAT}; measure them again")
    return found


class Screen:
    """Lines on standard output, in colour by rich on a terminal; what is being measured, on a terminal alone."""

    def __init__(self) -> None:
        self._print: Callable[[str], None] = lambda text: print(text, flush=True)
        with contextlib.suppress(ImportError):
            if sys.stdout.isatty():
                from rich.console import Console

                self._print = partial(Console(highlight=True, soft_wrap=True).print, markup=False)

    def note(self, text: str) -> None:
        """Print a line."""
        self.say("")
        self._print(text)

    def say(self, text: str) -> None:
        """What is being measured; the next line replaces it."""
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
