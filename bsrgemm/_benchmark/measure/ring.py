"""Attention over two ranks beside one: equality, bytes, and a cost model beside the times.

Ranks are started by mpiexec, each with one thread. A time is that of the processor outside of messages, since other
programs may share the cores; the least of some calls, of the slowest rank. Messages are timed by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import provenance
from ..table import Table, writing
from .ring_model import on_paper
from .scale import mpiexec

#: Seconds that ranks may take.
_PATIENCE = 3000
Row = dict[str, Any]


def on_ranks(size: int, tokens: Sequence[int], runs: int) -> list[Row]:
    """What so many ranks of `ring_ranks` have found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        words = ["--tokens", *map(str, tokens), "--runs", str(runs)]
        command = [mpiexec(), "-n", str(size), sys.executable, "-m", "bsrgemm._benchmark.measure.ring_ranks"]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, str(path), *words], check=True, timeout=_PATIENCE, env=environment)
        found: list[Row] = json.loads(path.read_text(encoding="utf-8"))
    return found


class Calibration:
    """What the predictions for two ranks are made of: attention on one rank, and messages between two."""

    def __init__(self, one: Sequence[Row], two: Sequence[Row]) -> None:
        self._alone = {(row["rule"], row["tokens"]): row for row in one if row["what"] == "attention"}
        messages = sorted((row for row in two if row["what"] == "message"), key=lambda r: r["bytes"])
        first, last = messages[0], messages[-1]
        self.latency = first["seconds"]
        self.link = (last["bytes"] - first["bytes"]) / (last["seconds"] - first["seconds"])

    def seconds(self, row: Row, way: str) -> float | None:
        """The model's time for two ranks without messages; None if one rank was not measured with half of the tokens.

        A rank's own keys take as long as a sequence of its length alone. Those of the other rank are as many pairs of
        query and key as all pairs of such a sequence without a rule, half of them if causal, and few with a window.
        """
        half = row["tokens"] // 2
        if row["ranks"] != 2 or ("full", half) not in self._alone:
            return None
        own, every = (self._alone[rule, half][way] for rule in (row["rule"], "full"))
        return own + {"full": every, "causal": every / 2, "window": 0.0}[row["rule"]]

    def travel(self, row: Row, way: str) -> float:
        """The model's time of the messages."""
        return (1 if way == "forward" else 2) * (self.latency + row["sent_bytes"] / self.link)


def measure(table: Table, options: Any) -> None:
    """Rows of 1 and 2 ranks with predictions."""
    one, two = (on_ranks(size, options.tokens, options.runs) for size in (1, 2))
    found = Calibration(one, two)
    for row in (*one, *two):
        if row["what"] != "attention":
            table.keep(row)
            continue
        name = f"{row['rule']}, {row['tokens']:,} tokens, {row['ranks']} ranks"
        times = []
        for way in ("forward", "backward"):
            row[f"model_{way}"] = predicted = found.seconds(row, way)
            row[f"travel_{way}"] = found.travel(row, way) if row["ranks"] > 1 else 0.0
            error = "" if predicted is None else f", model {predicted / row[way] - 1:+.0%}"
            times.append(f"{way} {row[way] * 1e3:8.1f} ms{error}")
        table.add(f"{name:35} {' | '.join(times)} | sent {row['sent_bytes']:,} B | error {row['error']:.0e}", **row)
    table.keep({"what": "model", "latency": found.latency, "link": found.link})
    for row in on_paper():
        table.keep({"what": "on paper", **row})


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048], help="lengths of sequences")
    parser.add_argument("--runs", type=int, default=12, help="calls of which the least counts")
    parser.add_argument("--keep", action="store_true", help="write what was measured to bench/results/")
    provenance.add_option(parser)
    options = parser.parse_args(argv)
    table = Table("scale_ring_cpu", "Attention over several ranks")
    with writing(table, options.keep):
        measure(table, options)
