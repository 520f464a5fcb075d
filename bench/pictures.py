"""Pictures of published results, by matplotlib. Lines differ in colour, marker and dash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from . import report

#: Okabe and Ito's colours, which most colour-blind people can tell apart; black is for references
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
_MARKERS, _DASHES = "osD^vPX", ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), "-")
_HATCHES = ("", "//", "..", "xx", "--", "\\\\", "++")
_STYLE = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
    "svg.fonttype": "none", "svg.hashsalt": "bsrgemm", "legend.frameon": False, "figure.constrained_layout.use": True,
}  # fmt: skip
Row = dict[str, Any]
#: (label of a line, x, y)
Points = Iterator[tuple[str, float, float]]


def _rate(row: Row, peer: str | None = None) -> float:
    """TFLOP/s of the stored blocks, or of the pairs that are seen; 0 where there is no such peer."""
    found = row if peer is None else row["peers"].get(peer, {})
    return row["flops"] / found["seconds"] / 1e12 if found.get("seconds") else 0.0


def _full(row: Row) -> float:
    """The density: the share of the operations of a dense product."""
    return row["flops"] / (2.0 * row["n"] ** 2 * row["columns"])


def _side(row: Row) -> str:
    return "{} x {}".format(*row["block"])


def _blocks(rows: list[Row]) -> Points:
    """The headline by side of a block, peers beside us, and the rate of dense cuBLAS."""
    for row in rows[:4]:
        for name in (None, *row["peers"]):
            rate = _rate(row, name) / (_full(row) if name == "cuBLAS" else 1)
            if rate:
                yield name or "bsrgemm", row["block"][0], rate


def _density(rows: list[Row]) -> Points:
    for row in rows:
        yield _side(row), _full(row), 1 / row["peers"]["cuBLAS"]["ratio"]


def _columns(rows: list[Row]) -> Points:
    for row in rows:
        yield _side(row), row["columns"], _rate(row)


def _small(rows: list[Row], beside: list[Row]) -> Points:
    """Shares of the bandwidth of a copy by square blocks; peers by those of the other file."""
    for row in rows:
        if row["block"][0] == row["block"][1]:
            yield "bsrgemm", row["block"][0], row["roof"]
    for row in beside:
        for name, peer in row["peers"].items() if row["kind"] == "float64" else ():
            yield name, row["block"][0], row["roof"] / peer["ratio"]


def _long(rows: list[Row]) -> Points:
    """Windows and random blocks grow with what is seen, dense attention with the square, which is computed."""
    dense, *others = rows
    start = dense["length"]
    for name, seconds in {"": dense["seconds"], ", cuDNN": dense["peers"].get("cuDNN", {}).get("seconds")}.items():
        for k in (1, 2, 4) if seconds else ():
            yield f"dense causal{name} (computed beyond {start >> 10}K)", start * k, seconds * k**2 * 1e3
    for row in others:
        yield "window 2048" if row.get("window") else "5 % random blocks", row["length"], row["seconds"] * 1e3


def _jobs(whole: list[Row], steps: list[Row]) -> Points:
    """From block-COO on the card to x; those of pyamg from the matrix on the host."""
    for row in whole:
        yield row["who"], row["unknowns"], row["unknowns"] / row["seconds"]
    for row in steps:
        if "pyamg" in row["what"] and row["what"].startswith("cube"):
            seconds = row["setup"] + row["seconds"]
            yield "pyamg on the host, set-up and solution", row["unknowns"], row["unknowns"] / seconds


def _lines(axes: Any, points: Points, options: dict[str, Any]) -> None:
    """Lines by label, with a legend under the axes, where it covers none of them."""
    series: dict[str, list[tuple[float, float]]] = {}
    for label, x, y in points:
        series.setdefault(label, []).append((x, y))
    for k, (label, found) in enumerate(series.items()):
        style: dict[str, Any] = {"color": _COLORS[k % 7], "marker": _MARKERS[k % 7], "linestyle": _DASHES[k % 7]}
        axes.plot(*zip(*sorted(found), strict=True), **style, markersize=5, label=label)
    if options.get("xscale") == "log2":
        marked = sorted({x for found in series.values() for x, _ in found})
        axes.set_xscale("log", base=2)
        axes.set_xticks(marked, [f"{int(v) >> 10}K" if v >= 1024 and v % 1024 == 0 else str(int(v)) for v in marked])
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set(**{name: value for name, value in options.items() if value != "log2"})
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize=8)


def _bars(axes: Any, rows: list[Row]) -> None:
    """Groups of bars; a peer that has no such mask has no bar."""
    rows = [row for row in rows if not row.get("kernel") and row["kind"] == "float16" and row["length"] >= 8192][:9]
    names = [None, *dict.fromkeys(name for row in rows for name in row["peers"])]
    height, ticks, bars = 0.8 / len(names), [], dict[str, Any]()
    for group, row in enumerate(rows):
        there = [(place % 7, name) for place, name in enumerate(names) if _rate(row, name)]
        for step, (place, name) in enumerate(there):
            y, rate = group + step * height, _rate(row, name)
            style = {"color": _COLORS[place], "hatch": _HATCHES[place], "edgecolor": "white", "linewidth": 0.5}
            bars[name or "bsrgemm"] = axes.barh(y, rate, height * 0.92, **style)
            axes.text(rate + 8, y, f"{rate:.0f}", va="center", fontsize=7)
        ticks.append(group + height * (len(there) - 1) / 2)
    axes.set_yticks(ticks, [row["what"].removeprefix("float16 ").replace(", ", ",\n", 1) for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="TFLOP/s of the pairs that are seen")
    order = [name or "bsrgemm" for name in names if (name or "bsrgemm") in bars]
    axes.legend([bars[n] for n in order], order, loc="upper center", bbox_to_anchor=(0.4, -0.1), ncols=3, fontsize=8)


_RATE = "TFLOP/s of the stored blocks"
_BY_BLOCK = {"xscale": "log2", "xlabel": "side of a block", "ylabel": _RATE, "ylim": (0, None)}
#: Name -> (title, points, files of results, options of the axes)
_OF_LINES: dict[str, tuple[str, Callable[..., Points], tuple[str, ...], dict[str, Any]]] = {
    "block": ("A @ B, float16, n = 8192, density 0.22", _blocks, ("products_cuda",), _BY_BLOCK),
    "density": ("Time over dense cuBLAS, by density: below 1 sparse wins", _density, ("products_density_cuda",),
                {"xlabel": "density", "ylabel": "time / cuBLAS", "xlim": (0, 1.02), "ylim": (0, None)}),
    "columns": ("A @ B by columns of B", _columns, ("products_columns_cuda",),
                {"xscale": "log2", "yscale": "log", "xlabel": "columns of B", "ylabel": _RATE}),
    "long": ("Time of attention by length: 8 heads of 128, float16", _long, ("attention_long_cuda",),
             {"xscale": "log2", "yscale": "log", "xlabel": "length", "ylabel": "ms"}),
    "small_blocks": ("A @ x in float64 as a share of the bandwidth of a copy", _small,
                     ("vectors_blocks_cuda", "vectors_cuda"),
                     {"xlabel": "side of a block", "ylabel": "share of the bandwidth", "ylim": (0, None)}),
    "solver_jobs": ("Elasticity of a cube, 3 x 3 float64, to 1e-8", _jobs, ("solver_jobs_cuda", "solvers_cuda"),
                    {"xscale": "log", "yscale": "log", "xlabel": "unknowns", "ylabel": "unknowns a second"}),
}  # fmt: skip
_ATTENTION = "Masked attention, forward"
ALL = (*_OF_LINES, "attention", "headline")


def draw(name: str, results: Path) -> Figure:
    """One of `ALL`, with the machine and the date in its corner."""
    files = _OF_LINES[name][2] if name in _OF_LINES else ("products_cuda", "attention_cuda")[name == "attention" :]
    found = [report.read(results / f"{file}.json") for file in files]
    rows = [each["rows"] for each in found]
    figure = Figure(figsize={"attention": (7.0, 6.4), "headline": (11.0, 5.8)}.get(name, (7.0, 4.3)))
    drawn: dict[str, Callable[[Any], None]] = {_ATTENTION: lambda axes: _bars(axes, rows[-1])}
    if name in _OF_LINES or name == "headline":
        title, points, _, options = _OF_LINES.get(name, _OF_LINES["block"])
        operands = rows[:1] if name == "headline" else rows
        drawn = {title: lambda axes: _lines(axes, points(*operands), options)} | (drawn if name == "headline" else {})
    for axes, (title, fill) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn.items(), strict=True):
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        fill(axes)
    strip, about = 0.16 / figure.get_size_inches()[1], found[0]["machine"]
    figure.get_layout_engine().set(rect=(0, strip, 1, 1 - strip))  # type: ignore[union-attr, call-arg]
    text = f"{about.get('card', about['cpu'])}, {about['date']}"
    figure.text(0.995, 0.005, text, ha="right", va="bottom", fontsize=7, color="#666666")
    return figure


def draw_all(results: Path, folder: Path) -> list[Path]:
    """Every picture as SVG; the paths that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{name}.svg" for name in ALL]
    with matplotlib.rc_context(_STYLE):
        for path in written:
            draw(path.stem, results).savefig(path, metadata={"Date": None})
    return written
