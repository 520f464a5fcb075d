"""Pictures of measured rows: the roofline, speed by density, block, columns and length, SpMV against the bandwidth.

Each figure is a function of what `results.read` gives, and None where the rows do not suffice for it. Lines differ in
colour, marker and dash, so that they can be told apart in print and by people who do not see colours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from .cells import Row, bandwidth_text, flops_unit

#: Okabe and Ito's colours, which most colour-blind people can tell apart; black is for references.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
MARKERS, DASHES = "osD^vPX", ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), "-")
_SIZE = (7.0, 4.3)
#: Height of the strip for the name of the machine.
_FOOTER_INCHES = 0.16
#: The least number of points of a line.
_LEAST = 3
STYLE = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
    "svg.fonttype": "none", "svg.hashsalt": "bsrgemm", "legend.frameon": False, "figure.constrained_layout.use": True,
}  # fmt: skip

Found = dict[str, Any]
Points = list[tuple[float, float]]


def draw_all(found: Found, folder: Path) -> list[Path]:
    """Every figure that these rows suffice for, as PNG and SVG; the paths that were written."""
    import matplotlib.pyplot as plt

    folder.mkdir(exist_ok=True)
    written = []
    for name, figure in figures(found).items():
        for kind in ("png", "svg"):
            path = folder / f"{name}.{kind}"
            figure.savefig(path, dpi=150, metadata={"Date": None} if kind == "svg" else None)
            written.append(path)
        plt.close(figure)
    return written


def figures(found: Found) -> dict[str, Any]:
    """Name -> figure of matplotlib."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        made = {name: draw(found) for name, draw in _FIGURES.items()}
    return {name: figure for name, figure in made.items() if figure is not None}


# ----------------------------------------------------------------------------------------- drawing
def new_axes(title: str, found: Found | None = None, size: tuple[float, float] = _SIZE) -> tuple[Any, Any]:
    """A figure with one pair of axes; the machine and the date are printed in its corner."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    if found is not None:
        about = found["machine"]
        footer(figure, f"{about.get('card', about['cpu'])}, {about['date']}")
    return figure, axes


def footer(figure: Any, text: str) -> None:
    """A line in the lower right corner, in a strip that axes and legends leave free."""
    engine = figure.get_layout_engine()
    if engine is not None:
        strip = _FOOTER_INCHES / figure.get_size_inches()[1]
        engine.set(rect=(0, strip, 1, 1 - strip))
    figure.text(0.995, 0.005, text, ha="right", va="bottom", fontsize=7, color="#666666")


def legend_below(axes: Any, columns: int, **options: Any) -> None:
    """A legend under the axes, where it covers no line."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=columns, **options)


def add_line(axes: Any, place: int, points: Points, label: str) -> None:
    """One line, in the colour, marker and dash of its number."""
    k = place % len(COLORS)
    x, y = zip(*sorted(points), strict=True)
    axes.plot(x, y, color=COLORS[k], marker=MARKERS[k], linestyle=DASHES[k], markersize=5, linewidth=1.6, label=label)


def powers(axes: Any, values: Iterable[float]) -> None:
    """A horizontal axis of powers of two, marked where something was measured."""
    from matplotlib.ticker import NullLocator

    marked = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xticks(marked, [_short(value) for value in marked])
    axes.xaxis.set_minor_locator(NullLocator())


def _short(value: float) -> str:
    """
    >>> _short(16384), _short(500), _short(12)
    ('16K', '500', '12')
    """
    whole = int(value)
    return f"{whole >> 10}K" if whole >= 1024 and whole % 1024 == 0 else str(whole)


def _fitting(series: dict[str, Points]) -> tuple[str, float, dict[str, Points]]:
    """The unit that fits lines of TFLOP/s, the factor to it, and the lines in it."""
    unit, scale = flops_unit(y * 1e12 for points in series.values() for _, y in points)
    factor = 1e12 / scale
    return unit, factor, {name: [(x, y * factor) for x, y in points] for name, points in series.items()}


# ------------------------------------------------------------------------------------------- rows
def _timed(found: Found, *groups: str) -> list[Row]:
    return [row for row in found["rows"] if row["group"] in groups and row.get("seconds")]


def _largest_family(rows: Sequence[Row], vary: Sequence[str], along: str) -> list[Row]:
    """Those rows that differ in `vary` and `along` alone and hold the most values of `along`."""
    families: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        # Whole blocks give a density only approximately, so rows are grouped by the density that was requested.
        fixed = {"n", "block", "asked_density", "columns", "dtype"} - {*vary, along, f"asked_{along}"}
        key = tuple(str(row[name]) for name in sorted(fixed))
        families.setdefault(key, []).append(row)
    best = max(families.values(), key=lambda family: len({str(row[along]) for row in family}), default=[])
    return best if len({str(row[along]) for row in best}) >= _LEAST else []


def _square(row: Row) -> str:
    R, C = row["block"]
    return f"{R} x {C}"


def _dense_name(rows: Sequence[Row]) -> str | None:
    """The dense peer of these rows."""
    for name in ("cuBLAS", "dense BLAS"):
        if any("seconds" in row["peers"].get(name, {}) for row in rows):
            return name
    return None


# ---------------------------------------------------------------------------------------- figures
def roofline(found: Found) -> Any:
    """Every problem under the two roofs of this machine."""
    import numpy as np

    rows = _timed(found, "gemm", "spmv", "attention", "decode")
    roofs = found.get("ceilings", {})
    rates, bandwidth = roofs.get("flops_per_second"), roofs.get("bytes_per_second")
    if not rows or not rates or not bandwidth:
        return None
    figure, axes = new_axes("Every problem under this machine's roofs", found)
    shown = [row["flops"] / row["traffic"] for row in rows]
    x = np.geomspace(min(shown) / 2, max(max(shown), max(rates.values()) / bandwidth) * 2, 200)
    unit, scale = flops_unit(rates.values())
    for kind, rate in sorted(rates.items(), key=lambda item: -item[1]):
        axes.plot(x, np.minimum(rate, bandwidth * x) / scale, color="black", linewidth=1)
        axes.text(x[-1], rate / scale, f"dense {kind}", ha="right", va="bottom", fontsize=8)
    ridge = max(rates.values()) / bandwidth
    if x[0] < ridge:  # above the slope, where no point can be
        middle = float(np.sqrt(x[0] * ridge))
        label = f"copy, {bandwidth_text(bandwidth)}  "
        axes.text(middle, bandwidth * middle / scale, label, ha="right", va="bottom", fontsize=8)
    for place, group in enumerate(dict.fromkeys(row["group"] for row in rows)):
        some = [row for row in rows if row["group"] == group]
        axes.plot(
            [row["flops"] / row["traffic"] for row in some], [row["flops"] / row["seconds"] / scale for row in some],
            MARKERS[place], color=COLORS[place], markersize=6, markeredgecolor="white", label=group,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="flops a byte", ylabel=unit)
    legend_below(axes, 4)
    return figure


def by_density(found: Found) -> Any:
    """Time over dense, by density; below 1 sparse wins."""
    rows = [row for row in _timed(found, "gemm") if "seconds" in row["peers"].get(_dense_name([row]) or "", {})]
    rows = _largest_family(rows, ("block",), "density")
    if not rows:
        return None
    name = _dense_name(rows)
    series: dict[str, Points] = {}
    for row in rows:
        series.setdefault(_square(row), []).append((row["density"], 1 / row["peers"][name]["ratio"]))
    return density_figure(series, str(name), found)


def density_figure(series: dict[str, Points], dense: str, found: Found) -> Any:
    """Lines of (density, time over dense), one for each block."""
    figure, axes = new_axes(f"Time over {dense}, by density: below 1 sparse wins", found)
    axes.axhline(1, color="black", linewidth=1)
    axes.text(0, 1.02, f"{dense}", fontsize=8, transform=axes.get_yaxis_transform())
    for place, (label, points) in enumerate(series.items()):
        if len(points) < 2:
            continue
        crossing = crossing_of(sorted(points))
        add_line(axes, place, points, label if crossing is None else f"{label} (up to {crossing:.2f})")
    axes.set(xlabel="density", ylabel=f"time / {dense}", xlim=(0, 1.02), ylim=(0, None))
    axes.legend(title="block")
    return figure


def crossing_of(points: Sequence[tuple[float, float]]) -> float | None:
    """Where a line first reaches 1, between two of its points; None if it does not.

    >>> crossing_of([(0.2, 0.5), (0.4, 0.9), (0.6, 1.3)])
    0.45
    """
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 < 1 <= y1:
            return round(x0 + (x1 - x0) * (1 - y0) / (y1 - y0), 4)
    return None


def by_block(found: Found) -> Any:
    """Effective rate by block size, beside every peer."""
    rows = [row for row in _timed(found, "gemm") if row["block"][0] == row["block"][1]]
    rows = _largest_family(rows, (), "block")
    if not rows:
        return None
    series: dict[str, Points] = {"bsrgemm": [(row["block"][0], row["tflops"]) for row in rows]}
    for row in rows:
        for name, peer in row["peers"].items():
            if "seconds" in peer and name not in ("cuBLAS", "dense BLAS", "nvmath"):
                series.setdefault(name, []).append((row["block"][0], row["flops"] / peer["seconds"] / 1e12))
    name = _dense_name(rows)
    dense = [row["flops"] / row["density"] / row["peers"][name]["seconds"] / 1e12 for row in rows] if name else []
    title = f"{rows[0]['dtype']}, density {rows[0]['density']:.2f}, {rows[0]['columns']} columns"
    return block_figure(series, title, found, (str(name), sum(dense) / len(dense)) if dense else None)


def block_figure(series: dict[str, Points], title: str, found: Found, dense: tuple[str, float] | None) -> Any:
    """Lines of (side of a block, TFLOP/s of the stored blocks), in GFLOP/s where all are small."""
    unit, factor, series = _fitting(series)
    dense = (dense[0], dense[1] * factor) if dense is not None else None
    figure, axes = new_axes(f"A @ B, {unit} of the stored blocks: {title}", found)
    if dense is not None:
        axes.axhline(dense[1], color="black", linewidth=1)
        axes.text(0.01, dense[1], f"{dense[0]}, dense", fontsize=8, va="bottom", transform=axes.get_yaxis_transform())
    for place, (label, points) in enumerate(series.items()):
        add_line(axes, place, points, label)
    powers(axes, (x for points in series.values() for x, _ in points))
    axes.set(xlabel="side of a block", ylabel=unit, ylim=(0, None))
    legend_below(axes, 2)
    return figure


def by_columns(found: Found) -> Any:
    """Effective rate by columns of B."""
    rows = _largest_family(_timed(found, "gemm"), ("block",), "columns")
    if not rows:
        return None
    series: dict[str, Points] = {}
    for row in rows:
        series.setdefault(_square(row), []).append((row["columns"], row["tflops"]))
    return columns_figure({name: points for name, points in series.items() if len(points) >= _LEAST}, found)


def columns_figure(series: dict[str, Points], found: Found) -> Any:
    """Lines of (columns of B, TFLOP/s), in GFLOP/s where all are small."""
    unit, _, series = _fitting(series)
    figure, axes = new_axes(f"A @ B, {unit} by columns of B", found)
    for place, (label, points) in enumerate(series.items()):
        add_line(axes, place, points, label)
    powers(axes, (x for points in series.values() for x, _ in points))
    axes.set(yscale="log", xlabel="columns of B", ylabel=unit)
    axes.legend(title="block")
    return figure


def by_length(found: Found) -> Any:
    """Time of attention by length, for each mask."""
    rows = _timed(found, "attention")
    families: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        B, H, _, D = row["shape"]
        families.setdefault((B, H, D, row["kv_heads"], row["dtype"]), []).append(row)
    best = max(families.values(), key=lambda family: len({row["shape"][2] for row in family}), default=[])
    series: dict[str, Points] = {}
    names = {"full": "full", "causal": "causal", "window": "window", "blocks": "random blocks"}
    for row in best:
        series.setdefault(names[row["mask"]], []).append((row["shape"][2], row["seconds"] * 1e3))
    series = {name: points for name, points in series.items() if len(points) >= _LEAST}
    if not series:
        return None
    B, H, _, D = best[0]["shape"]
    return length_figure(series, f"{B} x {H} heads of {D}, {best[0]['dtype']}", found)


def length_figure(series: dict[str, Points], title: str, found: Found) -> Any:
    """Lines of (length, ms)."""
    figure, axes = new_axes(f"Time of attention by length: {title}", found)
    for place, (label, points) in enumerate(series.items()):
        add_line(axes, place, points, label)
    powers(axes, (x for points in series.values() for x, _ in points))
    axes.set(yscale="log", xlabel="length", ylabel="ms")
    legend_below(axes, 2)
    return figure


def spmv(found: Found) -> Any:
    """A @ x as a share of the bandwidth of a copy, by block."""
    rows = [row for row in _timed(found, "spmv") if row["columns"] == 1]
    bandwidth = found.get("ceilings", {}).get("bytes_per_second")
    series: dict[str, Points] = {}
    for row in rows:
        series.setdefault(row["dtype"], []).append((row["block"][0], row["gbps"] * 1e9 / (bandwidth or 1)))
        for name, peer in row["peers"].items():
            if "seconds" in peer:
                share = row["traffic"] / peer["seconds"] / (bandwidth or 1)
                series.setdefault(f"{name}, {row['dtype']}", []).append((row["block"][0], share))
    series = {name: points for name, points in series.items() if len(points) >= _LEAST}
    if not series or not bandwidth:
        return None
    figure, axes = new_axes("A @ x as a share of the bandwidth of a copy", found)
    axes.axhline(1, color="black", linewidth=1)
    for place, (label, points) in enumerate(series.items()):
        add_line(axes, place, points, label)
    axes.set(xlabel="side of a block", ylabel="share of the bandwidth", ylim=(0, None))
    axes.set_xticks(sorted({side for points in series.values() for side, _ in points}))
    legend_below(axes, 2, fontsize=8)
    return figure


_FIGURES: dict[str, Callable[[Found], Any]] = {
    "roofline": roofline,
    "density": by_density,
    "block": by_block,
    "columns": by_columns,
    "length": by_length,
    "spmv": spmv,
}
