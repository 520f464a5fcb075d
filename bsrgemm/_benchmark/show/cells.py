"""The cells of a measured row as text, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

TITLES = {
    "gemm": "A @ B, block-sparse A, dense B",
    "spmv": "A @ x, small blocks in a band",
    "attention": "attention",
    "decode": "attention of one token on a KV cache",
}
#: Groups whose roof is the memory: they are read in GB/s.
_BY_BYTES = ("spmv", "decode")


def duration(seconds: float) -> str:
    """Three digits and a unit.

    >>> duration(0.00041249), duration(3.2e-5), duration(12.3456)
    ('0.412 ms', '32.0 us', '12.3 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        value = seconds * scale
        if value >= 0.1 or unit == "us":
            return (
                f"{value:.3g} {unit}"
                if value >= 100
                else f"{value:.{3 if value < 1 else 2 if value < 10 else 1}f} {unit}"
            )
    raise AssertionError


def rate(row: Row, seconds: float | None) -> str:
    """Useful work in a second: bytes where memory is the roof, operations elsewhere.

    >>> rate({"group": "spmv", "traffic": 8e8, "flops": 1.0}, 2e-4), rate({"group": "gemm", "flops": 6e7}, 1e-3)
    ('4,000 GB/s', '60.0 GFLOP/s')
    """
    if seconds is None:
        return ""
    if row["group"] in _BY_BYTES:
        return f"{row['traffic'] / seconds / 1e9:,.{0 if row['traffic'] / seconds >= 1e11 else 1}f} GB/s"
    value = row["flops"] / seconds / 1e12
    if value >= 1:
        return f"{value:,.{0 if value >= 100 else 1}f} TFLOP/s"
    return f"{value * 1e3:,.{0 if value >= 0.1 else 1}f} GFLOP/s"


def status(row: Row) -> str | None:
    """Why there is no time, or None."""
    if row.get("wrong"):
        return f"WRONG: {row['error']:.3g} times what rounding explains"
    if row.get("failed"):
        return str(row["failed"])
    return None


def peer_cell(found: dict[str, Any] | None) -> str:
    """How many times as long a peer takes.

    >>> peer_cell({"ratio": 2.345}), peer_cell({"failed": "OSError"}), peer_cell(None)
    ('2.35 x', 'failed', '')
    """
    if found is None:
        return ""
    if "ratio" in found:
        return f"{found['ratio']:.{2 if found['ratio'] < 10 else 1}f} x"
    return "wrong" if "wrong" in found else "failed" if "failed" in found else "-"


def columns(rows: Sequence[Row]) -> list[str]:
    """The heads of the columns that some rows of one group need; peers last, in the order of their first rows."""
    heads = ["", "time", "spread", "rate"]
    if any(row["group"] == "attention" for row in rows):
        heads.append("us a head")
    heads.append("of the roof")
    if any(row.get("sustained") for row in rows):
        heads.append("sustained")
    # a peer that serves none of them needs no column
    peers = dict.fromkeys(name for row in rows for name, found in row["peers"].items() if "without" not in found)
    return [*heads, *peers]


def cells(row: Row, heads: Sequence[str]) -> list[str]:
    """One row under these heads; what could not be timed says why in the second cell."""
    why = status(row)
    if why is not None:
        return [row["name"], why, *[""] * (len(heads) - 2)]
    seconds = row["seconds"]
    known = {
        "": row["name"],
        "time": duration(seconds),
        "spread": f"{(row['high'] - row['low']) / 2 / seconds:.1%}",
        "rate": rate(row, seconds),
        "of the roof": "" if row["of_roofline"] is None else f"{row['of_roofline']:.0%}",
        "sustained": rate(row, row.get("sustained")),
    }
    if row["group"] == "attention":
        each = seconds * 1e6 / row["shape"][0] / row["shape"][1]
        known["us a head"] = f"{each:,.0f}" if each >= 100 else f"{each:.3g}"
    return [known[head] if head in known else peer_cell(row["peers"].get(head)) for head in heads]


def remarks(rows: Sequence[Row]) -> list[str]:
    """Peers that failed or were wrong, each reason once."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for name, peer in row["peers"].items():
            if "failed" in peer:
                found.setdefault(f"{name} failed: {peer['failed']}", []).append(row["name"])
            elif "wrong" in peer:
                found.setdefault(f"{name} is wrong and was not timed", []).append(row["name"])
    return [
        f"{what} ({where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''})" for what, where in found.items()
    ]
