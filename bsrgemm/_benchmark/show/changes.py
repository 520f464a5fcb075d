"""What got faster or slower between two files of ``python -m bsrgemm bench --json``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .cells import Row, duration

#: Changes below this are noise on any machine.
_LEAST_NOISE = 0.03
#: Peers whose times show how fast the card was in each run: their clocks drift together with ours.
_REFERENCES = ("cuBLAS", "dense BLAS", "cuDNN", "cuSPARSE BSR", "cupyx csr", "scipy bsr", "NumPy")


@dataclass(frozen=True)
class Change:
    """One problem in two runs. `times` is new over old, beside the same reference in both where there is one."""

    name: str
    old: float
    new: float
    times: float
    noise: float
    reference: str | None

    @property
    def slower(self) -> bool:
        return self.times > 1 + self.noise

    @property
    def faster(self) -> bool:
        return self.times < 1 / (1 + self.noise)

    def __str__(self) -> str:
        beside = f" beside {self.reference}" if self.reference else ""
        verdict = "slower" if self.slower else "faster" if self.faster else "same"
        change = f"{duration(self.old)} -> {duration(self.new)}, {self.times:.2f} x{beside}"
        return f"{verdict:6} {self.name}: {change}, noise {self.noise:.1%}"


def _spread(timing: Row) -> float:
    return float((timing["high"] - timing["low"]) / 2 / timing["seconds"])


def _ratio_spread(peer: Row) -> float:
    """The range of the ratios of the rounds; the range of the times if there was only one round."""
    among = float((peer["ratio_high"] - peer["ratio_low"]) / peer["ratio"])
    return among or 2 * _spread(peer)


def changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[Change]:
    """What was timed in both runs."""
    known = {(row["group"], row["name"]): row for row in old["rows"]}
    for row in new["rows"]:
        was = known.get((row["group"], row["name"]))
        if was is None or not was.get("seconds") or not row.get("seconds"):
            continue
        times, noise = row["seconds"] / was["seconds"], _spread(row) + _spread(was)
        pairs = ((name, was["peers"].get(name, {}), row["peers"].get(name, {})) for name in _REFERENCES)
        reference = next((x for x in pairs if "ratio" in x[1] and "ratio" in x[2]), None)
        if reference is not None:
            _, before, after = reference
            times, noise = before["ratio"] / after["ratio"], _ratio_spread(before) + _ratio_spread(after)
        name = f"{row['group']} {row['name']}"
        shown = reference and reference[0]
        yield Change(name, was["seconds"], row["seconds"], times, max(_LEAST_NOISE, noise), shown)


def lost(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What was timed before and is wrong or fails now."""
    good = {(row["group"], row["name"]) for row in old["rows"] if row.get("seconds")}
    return [
        f"{row['group']} {row['name']}: {'wrong' if row.get('wrong') else row['failed']}"
        for row in new["rows"]
        if (row["group"], row["name"]) in good and (row.get("wrong") or row.get("failed"))
    ]
