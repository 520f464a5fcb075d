"""The cells of a measured row as text, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
#: A spread of the timings above this deserves a warning.
LARGE_SPREAD = 0.1


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


def flops_unit(rates: Iterable[float]) -> tuple[str, float]:
    """The unit for rates in flops a second, and its size: a CPU's are read in GFLOP/s.

    >>> flops_unit([4e10, 8e11]), flops_unit([5e12]), flops_unit([])
    (('GFLOP/s', 1000000000.0), ('TFLOP/s', 1000000000000.0), ('TFLOP/s', 1000000000000.0))
    """
    return ("GFLOP/s", 1e9) if 0 < max(rates, default=0.0) < 1e12 else ("TFLOP/s", 1e12)


def flops_text(rate: float) -> str:
    """
    >>> flops_text(8.134e10), flops_text(9.89e14)
    ('81.3 GFLOP/s', '989 TFLOP/s')
    """
    unit, scale = flops_unit([rate])
    return f"{rate / scale:,.3g} {unit}"


def bandwidth_text(rate: float) -> str:
    """
    >>> bandwidth_text(2.13e10), bandwidth_text(4.1e12)
    ('21 GB/s', '4.1 TB/s')
    """
    return f"{rate / 1e12:.2g} TB/s" if rate >= 1e12 else f"{rate / 1e9:.2g} GB/s"


def spread(row: Row) -> float:
    """Half of the range of the timings, as a share of the time."""
    return float((row["high"] - row["low"]) / 2 / row["seconds"])


def noise(rows: Sequence[Row]) -> str | None:
    """A warning where timings differ so much that small ratios mean nothing; None where they do not."""
    noisy = [row for row in rows if status(row) is None and row.get("seconds") and spread(row) > LARGE_SPREAD]
    if not noisy:
        return None
    worst = max(noisy, key=spread)
    return (
        f"The timings of {len(noisy)} of {len(rows)} problems spread by more than {LARGE_SPREAD:.0%}, "
        f"those of {worst['name']} by {spread(worst):.0%}: the machine was busy, and ratios near 1 mean nothing. "
        "Measure again on an idle machine."
    )


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
        "spread": f"{spread(row):.1%}",
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
