"""Cells and Markdown tables of rows of bench/results/*.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Row = dict[str, Any]
#: The mark after a figure that was measured with other code than today's, and its meaning
MARK = "†"
FOOTNOTE = (
    f"{MARK} This was measured before the last change of its kernel, or by a run that did not record its kernels."
)


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    ruler = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ruler, *lines])


def listed(
    found: Iterable[Row], header: Sequence[str], what: Callable[[Row], str], cells: Callable[[Row], Sequence[str]]
) -> str:
    """A table with a line for each row: what it is and its cells, of which the first is ours and may be marked.

    A row without numbers says why.
    """
    lines = []
    for row in found:
        why = failure(row)
        if why is None:
            first, *rest = cells(row)
            lines.append([what(row), marked(row, first), *rest])
        else:
            lines.append([row.get("what") or what(row), why, *[""] * (len(header) - 2)])
    return table(header, lines)


def marked(row: Row, text: str) -> str:
    """A figure of ours, marked where it was measured with other code.

    >>> marked({"stale": True}, "717"), marked({}, "717")
    ('717 †', '717')
    """
    return f"{text} {MARK}" if row.get("stale") else text


def failure(row: Row) -> str | None:
    """Why there is no number, if there is none."""
    if row.get("wrong"):
        return f"**WRONG**, off by {row.get('deviation', float('nan')):.1e}"
    return "**failed**" if row.get("failed") or row.get("seconds", 0) is None else None


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def three(value: float | None) -> str:
    """Three significant digits.

    >>> three(717.4), three(0.07446), three(12.345), three(2968.1), three(1.0), three(None)
    ('717', '0.0745', '12.3', '2,970', '1.00', '-')
    """
    if value is None:
        return "-"
    if value == 0:
        return "0"
    exponent = int(f"{abs(value):.2e}".partition("e")[2])
    return f"{round(value, 2 - exponent):,.{max(0, 2 - exponent)}f}"


def ratio(a: float | None, b: float | None) -> str:
    return "-" if a is None or not b else f"{a / b:.2f}"


def verdict(reached: bool | None) -> str:
    """ "yes" or "no"; nothing if there is no target."""
    return {True: "yes", False: "**no**", None: ""}[reached]


def target(value: float | None, digits: int = 2) -> str:
    """The target; nothing if there is none."""
    return number(value, digits) if value else ""


def pair(a: float | None, b: float | None, digits: int) -> str:
    return number(a, digits) if b is None else f"{number(a, digits)} / {number(b, digits)}"


def best(peers: dict[str, float | None], without: Sequence[str] = ()) -> float | None:
    return max((x for name, x in peers.items() if x is not None and name not in without), default=None)


def back_to_back(parts: Sequence[str]) -> str:
    """Sustained rates as a line after a table; nothing where there are none."""
    return f"\n\nBack to back, at the power limit: {'; '.join(parts)}." if parts else ""


def peer_names(found: Iterable[Row]) -> list[str]:
    """The peers of some rows, in the order in which they appear."""
    return list(dict.fromkeys(name for row in found for name in row.get("peers", {})))


def size(n: int) -> str:
    return f"{n // 1024}K" if n % 1024 == 0 and n >= 16384 else str(n)
