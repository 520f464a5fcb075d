"""Several ranks beside one: products in panels, messages, conjugate gradients, and a cost model beside the times.

Ranks are started by mpiexec, each with one thread. 1 and 2 ranks are timed; with 4 ranks only results are compared.
A time is the median of some calls, the least of many such medians because other programs may share the cores, and the
slowest rank counts. "Slow messages" come when half of the interior product has passed, as over a network.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import provenance
from ..table import Table, writing
from .scale_model import Machine, Panel, on_paper, product_seconds

#: What the product of small panels may take above that of the panel alone.
MOST_ABOVE = 150e-6
#: Seconds that ranks may take.
_PATIENCE = 3000
Row = dict[str, Any]


def mpiexec() -> str:
    """The launcher beside this Python, or the one on the PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise SystemExit('mpiexec is not installed: pip install "bsrgemm[mpi]"')
    return found


def on_ranks(size: int, *words: str) -> list[Row]:
    """What so many ranks of `scale_ranks` have found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        module = "bsrgemm._benchmark.measure.scale_ranks"
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [mpiexec(), "-n", str(size), sys.executable, "-m", module, str(path), *words]
        subprocess.run(command, check=True, timeout=_PATIENCE, env=environment)
        found: list[Row] = json.loads(path.read_text(encoding="utf-8"))
    return found


def hidden(row: Row, seconds: str = "seconds", exchange: str = "exchange") -> float:
    """The share of an exchange that does not lengthen a product, by the time of one without messages."""
    return min(1.0, max(0.0, 1 - (row[seconds] - row["silent"]) / row[exchange]))


def calibrated(one: Sequence[Row], two: Sequence[Row]) -> Machine:
    """The machine, by four measurements: the smallest and the largest product of one rank, and two messages."""
    vectors = [row for row in one if row["what"] == "product" and row["columns"] == 1]
    small, large = (pick(vectors, key=lambda r: r["panel_bytes"]) for pick in (min, max))
    size = [row["panel_bytes"] + row["vector_bytes"] for row in (small, large)]
    bandwidth = (size[1] - size[0]) / (large["seconds"] - small["seconds"])
    messages = sorted((row for row in two if row["what"] == "message"), key=lambda r: r["bytes"])
    link = (messages[-1]["bytes"] - messages[0]["bytes"]) / (messages[-1]["seconds"] - messages[0]["seconds"])
    reduce = next(row["seconds"] for row in two if row["what"] == "sum")
    call = max(0.0, small["seconds"] - size[0] / bandwidth)
    return Machine(bandwidth, call, messages[0]["seconds"], reduce, link, False)


def predicted(machine: Machine, row: Row) -> float:
    """The model's time for a product that was measured; a second call is made where there are ghosts."""
    panel = Panel(row["panel_bytes"], row["vector_bytes"], row["most_halo_bytes"], row["messages"])
    return product_seconds(machine, panel) + machine.call * (row["messages"] > 0)


def show(table: Table, row: Row) -> None:
    """One line for a row."""
    if row["what"] == "product":
        name = f"{row['matrix']}, {row['block_rows']:,} block rows, {row['columns']} columns, {row['ranks']} ranks"
        text = f"{name:55}"
        if row["timed"]:
            text += f" {row['seconds'] * 1e6:10.1f} us | local {row['local'] * 1e6:10.1f}"
        if row["ranks"] > 1:
            text += f" | halo {row['halo_bytes']:,} of at least {row['least_bytes']:,} B"
        if "hidden" in row:
            text += f", hidden {row['hidden']:4.0%}, slow messages {row['slow_hidden']:4.0%}"
        if "predicted" in row:
            text += f" | model {row['predicted'] * 1e6:10.1f}, {row['predicted'] / row['seconds'] - 1:+.0%}"
        table.add(f"{text} | error {row['error']:.0e}", **row)
    elif row["what"] == "cg":
        name = f"cg, {row['unknowns']:,} unknowns, {row['preconditioner']}, {row['ranks']} ranks"
        of_one = f"{row['iterations']} iterations, of one {row['iterations_of_one']}"
        table.add(f"{name:55} {row['seconds'] * 1e3:10.1f} ms | {of_one} | {row['difference']:.0e}", **row)
    else:
        table.add(f"{row['what']} {row.get('bytes', ''):>8} {row['seconds'] * 1e6:10.1f} us", **row)


def measure(table: Table, options: Any) -> None:
    """Rows of 1 and 2 ranks, with predictions, then equality with 4 ranks."""
    words = ["--device", options.device, "--unknowns", *map(str, options.unknowns), "--runs", str(options.runs)]
    one, two = (on_ranks(size, *words) for size in (1, 2))
    machine = calibrated(one, two)
    for row in (*one, *two):
        row["timed"] = True
        if row["what"] == "product":
            if row["ranks"] > 1:
                row["hidden"], row["slow_hidden"] = hidden(row), hidden(row, "slow", "slow_exchange")
            if row["columns"] == 1:
                row["predicted"] = predicted(machine, row)
        show(table, row)
    small = next(row for row in two if row.get("matrix") == "bands")
    above = small["seconds"] - small["local"]
    table.add(
        f"a product of {small['block_rows'] // 2} block rows a rank takes {above * 1e6:.1f} us more than its panel "
        f"alone, at most {MOST_ABOVE * 1e6:.0f} wanted",
        what="above", seconds=above, most=MOST_ABOVE, reached=above <= MOST_ABOVE,
    )  # fmt: skip
    table.keep({"what": "model", **machine.__dict__})
    for row in on_ranks(4, *words, "--equality"):
        row["timed"] = False
        show(table, row)
    for row in on_paper():
        table.keep({"what": "on paper", **row})


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="ranks on cuda share one card")
    parser.add_argument("--unknowns", type=int, nargs="+", default=[3_000, 9_000, 24_000], help="sizes of cubes")
    parser.add_argument(
        "--runs", type=int, default=1000, help="calls of a small product for a median; of larger ones fewer"
    )
    parser.add_argument("--keep", action="store_true", help="write what was measured to bench/results/")
    provenance.add_option(parser)
    options = parser.parse_args(argv)
    table = Table(f"scale_mpi_{options.device}", "Several ranks")
    with writing(table, options.keep):
        measure(table, options)
