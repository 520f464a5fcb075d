"""What is drawn: limits, ticks, shapes, shades, bars and words of a few pictures, as a list.

pictures.txt has a line for each thing that is drawn. A picture that was changed on purpose writes it anew:
``python -m tests.plotting.test_pictures``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import _plotting

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.colors import to_hex  # noqa: E402

PATH = Path(__file__).with_name("pictures.txt")


def numbers(x: Any) -> str:
    """Numbers, or their digest if there are many."""
    flat = np.asarray(np.ma.filled(np.ma.asarray(x).astype(float), -1)).reshape(-1)
    text = " ".join(f"{n:.6g}" for n in flat.tolist())
    return text if len(flat) <= 24 else f"{len(flat)} numbers {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def things(ax: Any) -> Iterator[str]:
    yield f"limits {numbers([*ax.get_xlim(), *ax.get_ylim()])} aspect {ax.get_aspect()} scale {ax.get_yscale()}"
    yield f"ticks {numbers(ax.get_xticks())} | {numbers(ax.get_yticks())}"
    locators = [vars(axis.get_major_locator()) for axis in (ax.xaxis, ax.yaxis)]
    yield f"ticks {[(x.get('_integer'), x.get('_min_n_ticks')) for x in locators]}"
    for words in (ax.title, ax.xaxis.label, ax.yaxis.label, *ax.texts):
        yield f"words {words.get_text()!r} {words.get_fontsize():.4g} {to_hex(words.get_color())}"
    shapes = []
    for patch in ax.patches:
        corners = patch.get_path().vertices if type(patch).__name__ == "PathPatch" else patch.get_bbox().get_points()
        face = to_hex(patch.get_facecolor(), keep_alpha=True)
        edge = to_hex(patch.get_edgecolor(), keep_alpha=True)
        shape = f"{type(patch).__name__} {face} {edge} {patch.get_label()!r}"
        shapes.append(f"{shape} {numbers(corners)} {patch.get_linewidth():.4g}")
    if len(shapes) > 8:
        shapes[1:-1] = [f"... {len(shapes)} shapes {hashlib.sha256(str(shapes).encode()).hexdigest()[:12]}"]
    yield from shapes
    for image in ax.images:
        shades = [to_hex(image.cmap(x)) for x in (0.0, 0.5, 1.0)]
        yield f"image {image.get_array().shape} {numbers(image.get_array())} {numbers(image.get_extent())} {shades}"
        bar = image.colorbar
        beside = (
            "no bar" if bar is None else f"{bar.orientation} {bar.extend} {bar.ax.get_xlabel()} {bar.ax.get_ylabel()}"
        )
        yield f"image {numbers(image.get_clim())} {image.get_interpolation()} {beside}"
    for lines in ax.collections:
        segments = getattr(lines, "get_segments", list)()
        colors = [to_hex(x) for x in lines.get_edgecolor()[:1]]
        yield f"lines {numbers(lines.get_linewidths())} {colors} {numbers(segments)}"
    for line in ax.lines:
        yield f"line {line.get_color()} {line.get_linestyle()} {line.get_linewidth():.4g} {numbers(line.get_xydata())}"
    legend = ax.get_legend()
    if legend is not None:
        yield f"legend {[x.get_text() for x in legend.get_texts()]} {legend._ncols} {legend.get_frame_on()}"


def matrix(rows: int, cols: int, R: int, C: int, density: float, twice: bool = False) -> Any:
    rng = np.random.default_rng(rows + cols)
    row, col = np.nonzero(rng.random((rows, cols)) < density)
    if twice:
        row, col = (np.concatenate([x, x[:3]]) for x in (row, col))
    return bg.bsr_array((np.zeros((len(row), R, C), np.float32), (row, col)), shape=(rows * R, cols * C))


def uneven() -> Any:
    row = np.concatenate([np.zeros(250, int), np.arange(1, 70)])
    col = np.concatenate([np.arange(250), np.zeros(69, int)])
    return bg.bsr_array((np.zeros((len(row), 1, 1), np.float32), (row, col)), shape=(70, 250))


def by_row(counts: list[int]) -> Any:
    """A matrix with so many blocks in each block row."""
    row = np.repeat(np.arange(len(counts)), counts)
    col = np.concatenate([np.arange(n) for n in counts])
    return bg.bsr_array((np.zeros((len(row), 1, 1), np.float32), (row, col)), shape=(len(counts), 62))


def corner(side: int, inside: bool = True) -> Any:
    """A matrix with a few blocks, and all blocks of its last row and column of cells if that is narrower."""
    row, col = (np.append(x, side - 1) for x in ([1, 2, 40] * inside, [1, 3, 70] * inside))
    row, col = np.array(row, int), np.array(col, int)
    return bg.bsr_array((np.zeros((len(row), 1, 1), np.float32), (row, col)), shape=(side, side))


def mask(which: str) -> Any:
    make = bg.BlockMask
    if which == "causal":
        return make.causal(100, block=16, device="cpu")
    if which == "heads":
        return make.random(64, block=16, per_row=1, heads=(2, 3), device="cpu", seed=3)
    return make.causal(100 * 16, 70 * 16, block=16, device="cpu")


PICTURES: dict[str, Callable[[], Any]] = {
    "few blocks": lambda: matrix(5, 7, 2, 3, 0.4).spy(),
    "few blocks, twice": lambda: matrix(5, 7, 2, 3, 0.4, twice=True).spy(histogram=False),
    "64 rows": lambda: matrix(64, 9, 1, 1, 0.3).spy(),
    "65 rows": lambda: matrix(65, 65, 2, 2, 0.3).spy(),
    "many blocks": lambda: matrix(1500, 900, 2, 3, 0.01).spy(),
    "a high matrix": lambda: matrix(800, 3, 2, 2, 0.2).spy(),
    "a higher matrix": lambda: matrix(3000, 3, 2, 2, 0.2).spy(histogram=False),
    "a wide matrix": lambda: matrix(3, 3000, 2, 2, 0.2).spy(histogram=False),
    "twice as wide as high": lambda: matrix(400, 800, 1, 1, 0.01).spy(histogram=False),
    "more than twice as wide": lambda: matrix(400, 801, 1, 1, 0.01).spy(histogram=False),
    "full cells at the end": lambda: corner(1001).spy(histogram=False),
    "blocks at the end only": lambda: corner(1001, inside=False).spy(histogram=False),
    "65 columns": lambda: matrix(3, 65, 2, 2, 0.3).spy(),
    "equal rows": lambda: by_row([3] * 7).spy(),
    "rows of 3 to 6 blocks": lambda: by_row([3, 4, 6, 6]).spy(),
    "rows of 2 to 6 blocks": lambda: by_row([2, 4, 6, 6]).spy(),
    "rows of 0 to 59 blocks": lambda: by_row([0, 0, 1, 59]).spy(),
    "rows of 1 to 61 blocks": lambda: by_row([1, 1, 30, 61]).spy(),
    "a hundred equal rows": lambda: by_row([1] * 100 + [3]).spy(),
    "99 equal rows": lambda: by_row([1] * 99 + [3]).spy(),
    "uneven rows": lambda: uneven().spy(),
    "no blocks": lambda: matrix(70, 70, 2, 2, 0.0).spy(),
    "nothing": lambda: bg.bsr_array((0, 0), blocksize=(1, 1)).spy(),
    "causal": lambda: mask("causal").plot(),
    "causal by elements": lambda: mask("causal").plot(elements=True),
    "one of several": lambda: mask("heads").plot(batch=1, head=2),
    "the first of several": lambda: mask("heads").plot(),
    "a mask of 64 blocks": lambda: bg.BlockMask.causal(64 * 16, 20, block=16, device="cpu").plot(),
    "a high mask": lambda: bg.BlockMask.causal(65 * 16 - 5, 40, block=16, device="cpu").plot(elements=True),
    "a wide mask": lambda: bg.BlockMask.causal(40, 65 * 16 - 5, block=16, device="cpu").plot(),
    "a mask of nothing": lambda: bg.BlockMask.causal(0, 0, block=16, device="cpu").plot(elements=True),
    "a high mask without keys": lambda: bg.BlockMask.causal(65 * 16, 0, block=16, device="cpu").plot(),
    "a wide mask without queries": lambda: bg.BlockMask.causal(0, 65 * 16, block=16, device="cpu").plot(),
    "a mask in given axes": lambda: mask("causal").plot(plt.subplots(figsize=(3, 4))[1]),
    "many blocks of a mask": lambda: mask("many").plot(),
    "many elements of a mask": lambda: mask("many").plot(elements=True),
}


def picture(name: str) -> list[str]:
    made = PICTURES[name]()
    figure = (made[0] if isinstance(made, tuple) else made).figure
    engine, places = figure.get_layout_engine(), figure.axes[0].get_subplotspec().get_gridspec()
    found = [f"size {numbers(figure.get_size_inches())} {len(figure.axes)} axes {type(made).__name__}"]
    found += [f"layout {None if engine is None else engine.get()} {places.get_width_ratios()}"]
    for ax in figure.axes:
        found += things(ax)
    plt.close("all")
    return [line.replace("\n", "\\n") for line in found]


def pinned() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in PATH.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            some = found.setdefault(line[2:], [])
        else:
            some.append(line)
    return found


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_those_that_were_written_down(name: str) -> None:
    assert picture(name) == pinned()[name]


def test_every_picture_was_written_down() -> None:
    assert list(pinned()) == list(PICTURES)


@pytest.mark.parametrize(
    "shape, similar", [((8, 1), True), ((9, 1), False), ((1, 8), True), ((16, 2), True), ((17, 2), False)]
)
def test_sides_are_to_scale_unless_one_is_more_than_eight_times_the_other(
    shape: tuple[int, int], similar: bool
) -> None:
    ax = plt.figure().add_subplot()
    assert _plotting._frame(ax, shape, (1, 1)) == similar
    assert ax.get_aspect() == (1.0 if similar else "auto")
    plt.close("all")


def write() -> None:
    """Write down what is drawn now."""
    out = []
    for name in PICTURES:
        out += [f"# {name}", *picture(name)]
    PATH.write_text("\n".join(out) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
