"""Pictures of published results, by matplotlib. Lines differ in colour, marker and dash."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from . import report

#: Okabe and Ito's colours, which most colour-blind people can tell apart; black is for references
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
_MARKERS, _DASHES = "osD^vPX", ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), "-")
_STYLE = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
    "svg.fonttype": "none", "svg.hashsalt": "bsrgemm", "legend.frameon": False, "figure.constrained_layout.use": True,
}  # fmt: skip

Found = dict[str, Any]
Row = dict[str, Any]
Points = list[tuple[float, float]]
Lines = dict[str, Points]


# ----------------------------------------------------------------------------------------- drawing
def _axes(title: str, found: Found, size: tuple[float, float] = (7.0, 4.3)) -> tuple[Figure, Any]:
    """A figure with one pair of axes; the machine and the date are printed in its corner."""
    figure = Figure(figsize=size)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    _footer(figure, found)
    return figure, axes


def _footer(figure: Figure, found: Found) -> None:
    about = found["machine"]
    engine: Any = figure.get_layout_engine()
    strip = 0.16 / figure.get_size_inches()[1]
    engine.set(rect=(0, strip, 1, 1 - strip))
    text = f"{about.get('card', about['cpu'])}, {about['date']}"
    figure.text(0.995, 0.005, text, ha="right", va="bottom", fontsize=7, color="#666666")


def _lines(axes: Any, series: Lines) -> None:
    for k, (label, points) in enumerate(series.items()):
        k %= len(COLORS)
        x, y = zip(*sorted(points), strict=True)
        axes.plot(x, y, color=COLORS[k], marker=_MARKERS[k], linestyle=_DASHES[k], markersize=5, label=label)


def _legend(axes: Any, columns: int = 2) -> None:
    """Under the axes, where it covers no line."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=columns, fontsize=8)


def _powers(axes: Any, values: Iterable[float]) -> None:
    """A horizontal axis of powers of two, marked where something was measured."""
    marked = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xticks(marked, [f"{int(v) >> 10}K" if v >= 1024 and v % 1024 == 0 else str(int(v)) for v in marked])
    axes.xaxis.set_minor_locator(NullLocator())


def _rate(row: Row, peer: str | None = None) -> float | None:
    """TFLOP/s of the stored blocks, ours or a peer's."""
    found = row if peer is None else row["peers"].get(peer, {})
    return row["flops"] / found["seconds"] / 1e12 if found.get("seconds") else None


def _square(row: Row) -> bool:
    return bool(row["block"][0] == row["block"][1])


# ---------------------------------------------------------------------------------------- products
def _by_block(found: Found) -> tuple[Lines, float]:
    """Lines over the side of a block of the headline, and the rate of a dense product."""
    rows = [row for row in found["rows"][:4] if _square(row)]
    series: Lines = {}
    for row in rows:
        for label, peer in (("bsrgemm", None), *((name, name) for name in row["peers"] if name != "nvmath")):
            rate = _rate(row, peer)
            if rate and label != "cuBLAS":
                series.setdefault(label, []).append((row["block"][0], rate))
    dense = [_rate(row, "cuBLAS") / row["density"] for row in rows]
    return series, sum(dense) / len(dense)


def _blocks(axes: Any, found: Found) -> None:
    series, dense = _by_block(found)
    axes.axhline(dense, color="black", linewidth=1)
    axes.text(0.01, dense, "dense cuBLAS", fontsize=8, va="bottom", transform=axes.get_yaxis_transform())
    _lines(axes, series)
    _powers(axes, (x for points in series.values() for x, _ in points))
    axes.set(xlabel="side of a block", ylabel="TFLOP/s of the stored blocks", ylim=(0, None))
    _legend(axes)


def block(found: Found) -> Figure:
    figure, axes = _axes("A @ B, float16, n = 8192, density 0.22", found)
    _blocks(axes, found)
    return figure


def density(found: Found) -> Figure:
    """Time over dense, by density; below 1 sparse wins."""
    series: Lines = {}
    for row in found["rows"]:
        series.setdefault(f"{row['block'][0]} x {row['block'][1]}", []).append(
            (row["density"], 1 / row["peers"]["cuBLAS"]["ratio"])
        )
    figure, axes = _axes("Time over dense cuBLAS, by density: below 1 sparse wins", found)
    axes.axhline(1, color="black", linewidth=1)
    _lines(axes, series)
    axes.set(xlabel="density", ylabel="time / cuBLAS", xlim=(0, 1.02), ylim=(0, None))
    axes.legend(title="block")
    return figure


def columns(found: Found) -> Figure:
    series: Lines = {}
    for row in found["rows"]:
        series.setdefault(f"{row['block'][0]} x {row['block'][1]}", []).append((row["columns"], _rate(row) or 0.0))
    figure, axes = _axes("A @ B, TFLOP/s by columns of B", found)
    _lines(axes, series)
    _powers(axes, (x for points in series.values() for x, _ in points))
    axes.set(yscale="log", xlabel="columns of B", ylabel="TFLOP/s")
    axes.legend(title="block")
    return figure


def small_blocks(found: Found, beside: Found) -> Figure:
    """Shares of the bandwidth of a copy, by block; peers by square blocks of the other file."""
    figure, axes = _axes("A @ x in float64 as a share of the bandwidth of a copy", found)
    axes.axhline(1, color="black", linewidth=1)
    series: Lines = {"bsrgemm": [(row["block"][0], row["roof"]) for row in found["rows"] if _square(row)]}
    for row in beside["rows"]:
        for name, peer in row["peers"].items() if row["dtype"] == "float64" else ():
            if peer.get("ratio"):
                series.setdefault(name, []).append((row["block"][0], row["roof"] / peer["ratio"]))
    _lines(axes, series)
    axes.set(xlabel="side of a block", ylabel="share of the bandwidth", ylim=(0, None))
    _legend(axes, 3)
    return figure


# --------------------------------------------------------------------------------------- attention
def _bars(axes: Any, found: Found) -> None:
    """Groups of bars; a peer that has no such mask has no bar."""
    rows = [row for row in found["rows"] if not row.get("kernel") and row["dtype"] == "float16"]
    shown = [row for row in rows if row["shape"][2] >= 8192][:9]
    names = list(dict.fromkeys(name for row in shown for name, peer in row["peers"].items() if peer.get("seconds")))
    height, ticks = 0.8 / (len(names) + 1), []
    for group, row in enumerate(shown):
        there = [(place, name) for place, name in enumerate([None, *names]) if _rate(row, name)]
        for step, (place, name) in enumerate(there):
            rate = _rate(row, name) or 0.0
            hatch = ("", "//", "..", "xx", "--", "\\\\", "++")[place % 7]
            axes.barh(group + step * height, rate, height * 0.92, color=COLORS[place % 7], hatch=hatch,
                      edgecolor="white", linewidth=0.5, label=name or "bsrgemm")  # fmt: skip
            axes.text(rate + 8, group + step * height, f"{rate:.0f}", va="center", fontsize=7)
        ticks.append(group + height * (len(there) - 1) / 2)
    axes.set_yticks(ticks, [row["what"].removeprefix("float16 ").replace(", ", ",\n", 1) for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="TFLOP/s of the pairs that are seen")
    bars = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    order = [name for name in ("bsrgemm", *names) if name in bars]
    axes.legend([bars[name] for name in order], order, loc="upper center", bbox_to_anchor=(0.4, -0.1), ncols=3,
                fontsize=8)  # fmt: skip


def attention(found: Found) -> Figure:
    figure, axes = _axes("Masked attention, forward", found, (7.0, 6.4))
    _bars(axes, found)
    return figure


def long(found: Found) -> Figure:
    """Time by length: windows and random blocks grow with what is seen, dense attention with the square."""
    series: Lines = {}
    dense = found["rows"][0]
    start = dense["shape"][2]
    for name, seconds in (("", dense["seconds"]), *((f", {n}", p["seconds"]) for n, p in dense["peers"].items())):
        series[f"dense causal{name} (computed beyond {start >> 10}K)"] = [
            (start * k, seconds * k**2 * 1e3) for k in (1, 2, 4)
        ]
    for row in found["rows"][1:]:
        label = "window 2048" if row["mask"] == "window" else "5 % random blocks"
        series.setdefault(label, []).append((row["shape"][2], row["seconds"] * 1e3))
    figure, axes = _axes("Time of attention by length: 8 heads of 128, float16", found)
    _lines(axes, series)
    _powers(axes, (x for points in series.values() for x, _ in points))
    axes.set(yscale="log", xlabel="length", ylabel="ms")
    _legend(axes)
    return figure


def headline(products: Found, attended: Found) -> Figure:
    """Products and attention side by side."""
    figure = Figure(figsize=(11.0, 5.8))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    _blocks(left, products)
    left.set_title("A @ B, float16, n = 8192, density 0.22", loc="left", fontsize=10, fontweight="bold")
    _bars(right, attended)
    right.set_title("Masked attention, forward", loc="left", fontsize=10, fontweight="bold")
    _footer(figure, products)
    return figure


def solver_jobs(whole: Found, steps: Found) -> Figure:
    """Unknowns a second from block-COO on the card to x; those of pyamg from the matrix on the host."""
    series: Lines = {}
    for row in whole["rows"]:
        series.setdefault(row["who"], []).append((row["unknowns"], row["unknowns"] / row["seconds"]))
    for row in steps["rows"]:
        if "pyamg" in row["what"] and row["what"].startswith("cube"):
            rate = row["unknowns"] / (row["setup"] + row["seconds"])
            series.setdefault("pyamg on the host, set-up and solution", []).append((row["unknowns"], rate))
    figure, axes = _axes("Elasticity of a cube, 3 x 3 float64, to 1e-8", whole)
    _lines(axes, series)
    axes.set(xscale="log", yscale="log", xlabel="unknowns", ylabel="unknowns a second")
    _legend(axes)
    return figure


#: Name -> (what draws it, from which files of results)
ALL: dict[str, tuple[Callable[..., Figure], tuple[str, ...]]] = {
    "headline": (headline, ("products_cuda", "attention_cuda")),
    "block": (block, ("products_cuda",)),
    "density": (density, ("products_density_cuda",)),
    "columns": (columns, ("products_columns_cuda",)),
    "attention": (attention, ("attention_cuda",)),
    "long": (long, ("attention_long_cuda",)),
    "small_blocks": (small_blocks, ("vectors_blocks_cuda", "vectors_cuda")),
    "solver_jobs": (solver_jobs, ("solver_jobs_cuda", "solvers_cuda")),
}


def draw_all(results: Path, folder: Path) -> list[Path]:
    """Every picture as SVG; the paths that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(_STYLE):
        for name, (draw, files) in ALL.items():
            figure = draw(*(report.read(results / f"{file}.json") for file in files))
            written.append(folder / f"{name}.svg")
            figure.savefig(written[-1], metadata={"Date": None})
    return written
