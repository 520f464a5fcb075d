"""Several ranks of MPI beside one, started by mpiexec with one thread each: matrices in panels, and attention."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..machine import ROOT
from ..measure import Row, Run
from ..report import TIME, Column, duration, error, field
from ..study import Study

#: Seconds that ranks may take
_PATIENCE = 3000
#: How a row begins -> the largest difference from one rank: of float64, of solutions to 1e-8, of float32
_ALLOWED = {"A @ x": 1e-13, "cg": 1e-6, "full": 1e-5, "causal": 1e-5, "window": 1e-5}


def mpiexec() -> str:
    """The launcher beside this Python, or the one on the PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise ImportError('mpiexec is not installed: pip install -e ".[mpi]"')
    return found


def on_ranks(count: int, what: str, sizes: Sequence[int], runs: int, *words: str) -> list[Row]:
    """What so many ranks of `bench.ranks` have found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [mpiexec(), "-n", str(count), sys.executable, "-m", "bench.ranks", str(path), what]
        command += ["--sizes", *map(str, sizes), "--runs", str(runs), *words]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, timeout=_PATIENCE, env=environment, cwd=ROOT, capture_output=True)
        found: list[Row] = json.loads(path.read_text(encoding="utf-8"))
    for row in found:
        allowed = next((most for start, most in _ALLOWED.items() if row["what"].startswith(start)), math.inf)
        if not row.get("error", 0.0) <= allowed or not row.get("repeats", True):
            row["wrong"] = True
        row["what"] += f", {row['ranks']} rank{'s' * (row['ranks'] > 1)}"
    return found


def matrices(run: Run) -> Iterator[Row]:
    """Messages, products and conjugate gradients of 1 and 2 ranks; equality of results with 4. Ranks share one card."""
    device = ("--device", run.place.device)
    sizes, runs = run.place.some(((3_000, 9_000, 24_000), 1000), ((1_500,), 5))
    for count in (1, 2):
        yield from on_ranks(count, "matrices", sizes, runs, *device)
    for row in (row for row in on_ranks(4, "matrices", sizes[:1], 1, *device) if "error" in row):
        yield {name: value for name, value in row.items() if name not in ("seconds", "local", "exchange")}


def ring(run: Run) -> Iterator[Row]:
    """Attention of 1 and 2 ranks: processor time outside of messages, of the slowest rank."""
    sizes, runs = run.place.some(((512, 1024, 2048), 12), ((128,), 2))
    for count in (1, 2):
        yield from on_ranks(count, "ring", sizes, runs)


STUDIES = (
    Study(
        "ranks", "a matrix in panels on several ranks of MPI, beside one", matrices,
        (
            TIME, field("its panel alone", "local", duration),
            Column("halo, B", lambda row: f"{row['halo_bytes']:,}" if row.get("halo_bytes") else ""),
            field("its exchange alone", "exchange", duration),
            Column("iterations (of one)", lambda row:
                   f"{row['iterations']} ({row['iterations_of_one']})" if "iterations" in row else ""),
            field("error", "error", error),
        ),
    ),
    Study(
        "ring", "attention over several ranks of MPI, beside one", ring,
        (
            field("forward", "seconds", duration), field("backward", "backward", duration),
            field("sent, B", "sent_bytes", lambda sent: f"{sent:,}"), field("error", "error", error),
        ),
        devices=("cpu",),
    ),
)  # fmt: skip
