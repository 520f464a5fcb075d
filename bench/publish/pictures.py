"""The pictures of results in docs/pictures/results, drawn from bench/results/*.json.

Each file holds a digest of what it shows; with --check nothing is written, and the exit status is 1 where a picture is
not of these results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from bsrgemm._benchmark.show import figures
from bsrgemm._benchmark.show.figures import COLORS

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PICTURES = ROOT / "bench" / "results", ROOT / "docs" / "pictures" / "results"
Row = dict[str, Any]
#: The names of peers as the tables have them, and as a reader knows them
PEERS = {"torch BSR": "torch (Triton)", "cuSPARSE ELL": "cuSPARSE Blocked-ELL", "cuSPARSE BSR": "cuSPARSE BSR"}


def by_block(found: dict[str, Any]) -> dict[str, figures.Points]:
    """Rates of the headline, float16 and density 0.22, by block: ours and the peers'."""
    rows = [
        row for row in found["rows"]
        if row.get("sustained") and row["dtype"] == "float16" and row["pattern"] == "uniform"
    ]  # fmt: skip
    series: dict[str, figures.Points] = {"bsrgemm": [(row["block"][0], row["tflops"]) for row in rows]}
    for name, label in PEERS.items():
        points = [(row["block"][0], row["peers"][name]) for row in rows if row["peers"].get(name)]
        if points:
            series[label] = points
    return series


def dense_rate(found: dict[str, Any]) -> float:
    rates = [row["dense_tflops"] for row in found["rows"] if row.get("sustained") and row["dtype"] == "float16"]
    return sum(rates) / len(rates)


def blocks(found: dict[str, Any]) -> Figure:
    title = "float16, n = 8192, density .22"
    return figures.block_figure(by_block(found), title, found, ("cuBLAS", dense_rate(found)))


def density(found: dict[str, Any]) -> Figure:
    series: dict[str, figures.Points] = {}
    for row in found["rows"]:
        if row.get("ratio"):
            series.setdefault(f"{row['block']} x {row['block']}", []).append((row["density"], row["ratio"]))
    return figures.density_figure(series, "cuBLAS", found)


def columns(found: dict[str, Any]) -> Figure:
    series: dict[str, figures.Points] = {}
    for row in found["rows"]:
        if row.get("tflops"):
            series.setdefault(f"{row['block']} x {row['block']}", []).append((row["columns"], row["tflops"]))
    return figures.columns_figure(series, found)


def small_blocks(blocks: dict[str, Any], table: dict[str, Any]) -> Figure:
    """A @ x by side of square blocks: the share of a copy's bandwidth, beside cuSPARSE where it was timed."""
    figure, axes = figures.new_axes("A @ x, square blocks, 27 a row: share of the bandwidth of a copy", blocks)
    squares = [row for row in blocks["rows"] if row.get("share") and row["block"][0] == row["block"][1]]
    beside = [row for row in table["rows"] if row.get("share")]
    series = {"bsrgemm, float64": [(row["block"][0], row["share"]) for row in squares]}
    for dtype in ("float64", "float32"):
        own = [row for row in beside if row["dtype"] == dtype]
        if dtype == "float32":
            series["bsrgemm, float32"] = [(row["block"][0], row["share"]) for row in own]
        peer = [(row["block"][0], row["peers"]["cuSPARSE BSR"]) for row in own if row["peers"].get("cuSPARSE BSR")]
        series[f"cuSPARSE BSR, {dtype}"] = peer
    for place, (name, points) in enumerate(series.items()):
        ours = name.startswith("bsrgemm")
        axes.plot(*zip(*points, strict=True), label=name, color=COLORS[place], marker="osD^"[place],
                  linestyle="-" if ours else ":", linewidth=1.6 if ours else 1.2)  # fmt: skip
    axes.set(xlabel="side of a block", ylabel="share of a copy", ylim=(0, 1.15), xticks=range(1, 17))
    axes.legend(loc="lower right", ncols=2, fontsize=8)
    return figure


#: Peers of attention as the tables have them, and as a reader knows them
ATTENTION_PEERS = {
    "cuDNN": "cuDNN (torch)",
    "FA4": "FlashAttention-4",
    "cuDNN BSA": "cuDNN frontend, block-sparse",
    "flash": "FlashAttention-2 (torch)",
}
#: Cases of the table of attention: (shape, mask, dtype) -> what to call it
ATTENTION = {
    ((1, 16, 16384, 128), "full", "float16"): "full, 16K",
    ((1, 16, 16384, 128), "causal", "float16"): "causal, 16K",
    ((1, 16, 16384, 128), "causal window 2048", "float16"): "window 2048, 16K",
    ((1, 8, 131072, 128), "causal window 2048", "float16"): "window 2048, 128K",
    ((1, 16, 16384, 128), "26 of 128 blocks 128 per head", "float16"): "random 128-blocks, 16K",
    ((1, 16, 16384, 128), "51 of 256 blocks 64", "float16"): "random 64-blocks, 16K",
    ((1, 32, 16384, 64), "causal", "float16"): "causal, heads of 64",
    ((1, 16, 8192, 256), "causal", "float16"): "causal, heads of 256",
    ((1, 16, 16384, 128), "full", "e4m3"): "full, fp8",
}


def attention_bars(axes: Any, found: dict[str, Any]) -> None:
    """Bars of TFLOP/s, a group for each case; a peer that has no such mask has no bar."""
    rows = {(tuple(row["shape"]), row["mask"], row["dtype"]): row for row in found["rows"] if not row.get("kernel")}
    shown = [(label, rows[key]) for key, label in ATTENTION.items() if key in rows]
    series = {"bsrgemm": [row["tflops"] for _, row in shown]}
    series |= {label: [row["peers"].get(name) for _, row in shown] for name, label in ATTENTION_PEERS.items()}
    series = {label: rates for label, rates in series.items() if any(rates)}
    height = 0.8 / len(series)
    middles = []
    for group in range(len(shown)):
        there = [place for place, rates in enumerate(series.values()) if rates[group]]
        middles.append(group + height * (len(there) - 1) / 2)
        for row, place in enumerate(there):
            label, rates = list(series.items())[place]
            y = group + row * height
            axes.barh(y, rates[group], height * 0.92, label=label, color=COLORS[place], edgecolor="white",
                      linewidth=0.5, hatch=("", "//", "..", "xx", "--")[place])  # fmt: skip
            axes.text(rates[group] + 8, y, f"{rates[group]:.0f}", va="center", fontsize=7)
    axes.set_yticks(middles, [label for label, _ in shown])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="TFLOP/s of the pairs that are seen")
    bars = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    order = [label for label in series if label in bars]
    axes.legend([bars[label] for label in order], order, loc="upper center", bbox_to_anchor=(0.4, -0.1),
                ncols=min(3, len(order)), fontsize=8)  # fmt: skip


def attention(found: dict[str, Any]) -> Figure:
    figure, axes = figures.new_axes("Masked attention, forward", found, (7.0, 6.4))
    attention_bars(axes, found)
    return figure


def long(found: dict[str, Any]) -> Figure:
    """Time by length: windows and random blocks grow with what is seen, dense attention with the square."""
    series: dict[str, figures.Points] = {}
    (dense,) = [row for row in found["rows"] if row["mask"] == "dense causal"]
    start = dense["length"]
    names = {"ours": "dense causal", "cuDNN": "dense causal, cuDNN"}
    for name, seconds in dense["seconds"].items():
        series[f"{names[name]} (computed beyond {start >> 10}K)"] = [
            (start * k, seconds * k**2 * 1e3) for k in (1, 2, 4)
        ]
    for row in found["rows"]:
        if row is not dense:
            label = "window 2048" if "window" in row["mask"] else "5 % random blocks"
            series.setdefault(label, []).append((row["length"], row["seconds"] * 1e3))
    return figures.length_figure(series, "8 heads of 128, float16", found)


def headline(gemm: dict[str, Any], attended: dict[str, Any]) -> Figure:
    """Products and attention side by side."""
    figure = Figure(figsize=(11.0, 5.8))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    rate = dense_rate(gemm)
    left.axhline(rate, color="black", linewidth=1)
    left.text(16, rate + 8, "dense cuBLAS", fontsize=8)
    for place, (label, points) in enumerate(by_block(gemm).items()):
        figures.add_line(left, place, points, label)
    figures.powers(left, (16, 32, 64, 128))
    left.set(xlabel="side of a block", ylabel="TFLOP/s of the stored blocks", ylim=(0, None))
    left.set_title("A @ B, float16, n = 8192, density .22", loc="left", fontsize=10, fontweight="bold")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize=8)
    attention_bars(right, attended)
    right.set_title("Masked attention, forward", loc="left", fontsize=10, fontweight="bold")
    about = gemm["machine"]
    figures.footer(figure, f"{about['card']}, {about['date']}")
    return figure


def jobs(whole: dict[str, Any], steps: dict[str, Any]) -> Figure:
    """Unknowns a second from block-COO on the card to x; those of pyamg from the matrix on the host."""
    series: dict[str, figures.Points] = {}
    for row in whole["rows"]:
        if "rate" in row:
            series.setdefault(row["what"], []).append((row["unknowns"], row["rate"]))
    for row in steps["rows"]:
        if row["what"].startswith("pyamg") and row["problem"] == "cube":
            seconds = row["setup"] + row["solution"]
            series.setdefault("pyamg on the host, set-up and solution", []).append(
                (row["unknowns"], row["unknowns"] / seconds)
            )
    figure, axes = figures.new_axes("Elasticity of a cube, 3 x 3 float64, to 1e-8", whole)
    for place, (label, points) in enumerate(series.items()):
        figures.add_line(axes, place, sorted(points), label)
    axes.set(xscale="log", yscale="log", xlabel="unknowns", ylabel="unknowns a second")
    figures.legend_below(axes, 2)
    return figure


@dataclass(frozen=True)
class Picture:
    """What is drawn from which files of results."""

    draw: Callable[..., Figure]
    files: tuple[str, ...]

    def found(self, results: Path) -> list[dict[str, Any]]:
        return [json.loads((results / f"{name}.json").read_text(encoding="utf-8")) for name in self.files]

    def digest(self, results: Path) -> str:
        """A digest of the numbers and of the machine that is named with them."""
        shown = json.dumps([[x["machine"], x["rows"]] for x in self.found(results)], sort_keys=True)
        return hashlib.sha256(shown.encode()).hexdigest()[:16]

    def write(self, path: Path, results: Path) -> None:
        with matplotlib.rc_context(figures.STYLE):
            figure = self.draw(*self.found(results))
            figure.savefig(path, metadata={"Date": None, "Description": f"results {self.digest(results)}"})


ALL = {
    "headline": Picture(headline, ("gemm_table_cuda", "attention_table_cuda")),
    "block": Picture(blocks, ("gemm_table_cuda",)),
    "density": Picture(density, ("gemm_density_cuda",)),
    "columns": Picture(columns, ("gemm_columns_cuda",)),
    "attention": Picture(attention, ("attention_table_cuda",)),
    "long": Picture(long, ("attention_long_cuda",)),
    "small_blocks": Picture(small_blocks, ("spmv_blocks_cuda", "spmv_table_cuda")),
    "solver_jobs": Picture(jobs, ("solver_jobs_cuda", "solvers_cuda")),
}


def stale(pictures: Path, results: Path) -> list[str]:
    """The pictures that are not of these results."""

    def shows(name: str, picture: Picture) -> bool:
        path = pictures / f"{name}.svg"
        return path.is_file() and f"results {picture.digest(results)}" in path.read_text(encoding="utf-8")

    return [name for name, picture in ALL.items() if not shows(name, picture)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a picture is of other results")
    parser.add_argument("--folder", type=Path, default=PICTURES)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    if options.check:
        found = stale(options.folder, options.results)
        for name in found:
            print(f"{name}.svg is not of these results: run python bench/publish/pictures.py", file=sys.stderr)
        return int(bool(found))
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, picture in ALL.items():
        picture.write(options.folder / f"{name}.svg", options.results)
        print(f"drawn: {name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
