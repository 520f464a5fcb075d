"""What the pictures of docs/kernels are drawn with: a page, boxes in a color for each kind of work, lanes and arrows.

Lengths are tenths of an inch, y runs down. A text that does not fit its box, leaves the picture or meets another one is
an error, so that a picture cannot be drawn unreadable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.textpath import TextToPath

WIDTH = 75.0
SIZE = 8.5
_SETTINGS = {"svg.hashsalt": "bsrgemm", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"]}

#: Kind of box -> (fill, color of text, name in the legend). Colors of Okabe and Ito, safe for the color-blind.
KINDS = {
    "look": ("#F0E442", "black", "indices, masks"),
    "load": ("#56B4E9", "black", "copy, read"),
    "wait": ("white", "#555555", "wait, arriving"),
    "multiply": ("#0072B2", "white", "products"),
    "softmax": ("#E69F00", "black", "softmax"),
    "sum": ("#CC79A7", "black", "sums"),
    "store": ("#009E73", "black", "result"),
    "repair": ("#D55E00", "black", "done again"),
    "plain": ("#EEEEEE", "black", ""),
    "absent": ("white", "#555555", "not there"),
}
_DASHED = ("wait", "absent")


@dataclass(frozen=True)
class Box:
    """A rectangle that was drawn; its sides and the middles of them are where arrows begin and end."""

    x: float
    y: float
    w: float
    h: float

    @property
    def left(self) -> tuple[float, float]:
        return self.x, self.y + self.h / 2

    @property
    def right(self) -> tuple[float, float]:
        return self.x + self.w, self.y + self.h / 2

    @property
    def top(self) -> tuple[float, float]:
        return self.x + self.w / 2, self.y

    @property
    def bottom(self) -> tuple[float, float]:
        return self.x + self.w / 2, self.y + self.h

    def above(self, part: float) -> tuple[float, float]:
        """A point of the upper side, 0 at its left end."""
        return self.x + part * self.w, self.y

    def below(self, part: float) -> tuple[float, float]:
        """A point of the lower side."""
        return self.x + part * self.w, self.y + self.h


def extent(text: str, size: float, bold: bool = False) -> tuple[float, float]:
    """Width and height of a text of one or more lines."""
    font = FontProperties(family="DejaVu Sans", size=size, weight="bold" if bold else "normal")
    widths = [TextToPath().get_text_width_height_descent(line, font, False)[0] for line in text.split("\n")]
    return max(widths) / 7.2, len(widths) * size * 1.2 / 7.2


class Picture:
    """A page of fixed width on which the pictures are drawn."""

    def __init__(self, height: float, title: str) -> None:
        self.height = height
        self.figure = Figure(figsize=(WIDTH / 10, height / 10), facecolor="white")
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_xlim(0, WIDTH)
        self.axes.set_ylim(height, 0)
        self.axes.axis("off")
        self._texts: list[tuple[float, float, float, float, str]] = []
        self._boxes: list[Box] = []
        self._kinds: list[str] = []
        self.text(1, 1.6, title, size=10, bold=True)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        at: str = "left",
        size: float = SIZE,
        bold: bool = False,
        color: str = "black",
    ) -> None:
        """Text with the middle of its height at y, beginning, centered or ending at x."""
        w, h = extent(text, size, bold)
        x0 = x - {"left": 0.0, "center": w / 2, "right": w}[at]
        place = (x0, y - h / 2, x0 + w, y + h / 2, text)
        if place[0] < 0 or place[1] < 0 or place[2] > WIDTH or place[3] > self.height:
            raise ValueError(f"{text!r} leaves the picture: {place[:4]}")
        for other in self._texts:
            if place[0] < other[2] and other[0] < place[2] and place[1] < other[3] and other[1] < place[3]:
                raise ValueError(f"{text!r} meets {other[4]!r} at {place[:4]}")
        self._texts.append(place)
        self.axes.text(
            x, y, text, ha=at, va="center_baseline" if "\n" not in text else "center", fontsize=size,
            fontweight="bold" if bold else "normal", color=color, linespacing=1.2, zorder=4,
        )  # fmt: skip

    def prose(self, y: float, text: str, *, x: float = 1, right: float = WIDTH - 2, size: float = SIZE) -> None:
        """Text in lines as long as fit, the first of them at y."""
        lines = [""]
        for word in text.split():
            longer = f"{lines[-1]} {word}".strip()
            if extent(longer, size)[0] <= right - x:
                lines[-1] = longer
            else:
                lines.append(word)
        for i, line in enumerate(lines):
            self.text(x, y + i * 1.75 * size / SIZE, line, size=size)

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        text: str = "",
        kind: str = "plain",
        *,
        size: float = SIZE,
        legend: bool = True,
    ) -> Box:
        fill, color, name = KINDS[kind]
        if name and legend and kind not in self._kinds:
            self._kinds.append(kind)
        style = "dotted" if kind in _DASHED else "solid"
        edge = "#888888" if kind in _DASHED else "#333333"
        self.axes.add_patch(Rectangle((x, y), w, h, facecolor=fill, edgecolor=edge, lw=0.6, ls=style, zorder=2))
        if text:
            wide, high = extent(text, size)
            if wide > w or high > h + 0.3:
                raise ValueError(f"{text!r} of {wide:.1f} x {high:.1f} does not fit a box of {w:.1f} x {h:.1f}")
            self.text(x + w / 2, y + h / 2, text, at="center", size=size, color=color)
        self._boxes.append(Box(x, y, w, h))
        return self._boxes[-1]

    def arrow(self, start: tuple[float, float], end: tuple[float, float], *, dashed: bool = False) -> None:
        self.axes.add_patch(
            FancyArrowPatch(
                start, end, arrowstyle="-|>", mutation_scale=7, lw=0.8, ls="dashed" if dashed else "solid",
                color="black", shrinkA=0, shrinkB=0, zorder=3,
            )
        )  # fmt: skip

    def line(self, start: tuple[float, float], end: tuple[float, float], *, dashed: bool = False) -> None:
        self.axes.plot(
            *zip(start, end, strict=True), color="#555555", lw=0.7, ls="dashed" if dashed else "solid", zorder=1
        )

    def grid(
        self, x: float, y: float, rows: Sequence[str], cell: float, kinds: dict[str, str], *, high: float | None = None
    ) -> None:
        """Cells, one for each letter: its kind of box, an empty one for a dot, a gap for a blank."""
        for i, row in enumerate(rows):
            for j, letter in enumerate(row):
                if letter != " ":
                    kind = kinds.get(letter, "absent")
                    self.box(x + j * cell, y + i * (high or cell), cell, high or cell, kind=kind, legend=False)

    def legend(self, y: float) -> None:
        """The kinds of boxes that this picture has."""
        x = 1.0
        for kind in KINDS:
            if kind in self._kinds:
                name = KINDS[kind][2]
                self.box(x, y - 0.6, 2, 1.2, kind=kind, legend=False)
                self.text(x + 2.6, y, name, size=8)
                x += 3.9 + extent(name, 8)[0]

    def check(self) -> None:
        """A text is inside of a box or outside."""
        for x0, y0, x1, y1, text in self._texts:
            for b in self._boxes:
                apart = x1 <= b.x or b.x + b.w <= x0 or y1 - 0.2 <= b.y or b.y + b.h <= y0 + 0.2
                inside = b.x <= x0 and x1 <= b.x + b.w and b.y <= y0 + 0.2 and y1 - 0.2 <= b.y + b.h
                if not apart and not inside:
                    raise ValueError(f"{text!r} meets the edge of {b}")

    def save(self, path: Path) -> None:
        self.check()
        for artist in (*self.axes.patches, *self.axes.lines):
            artist.set_clip_on(False)  # nothing leaves the picture, and clipping would fill the file
        with matplotlib.rc_context(_SETTINGS):
            if path.suffix == ".svg":
                self.figure.savefig(path, metadata={"Date": None, "Creator": None})
            else:
                self.figure.savefig(path, dpi=130)


class Lanes:
    """Rows of a time diagram: who does something, and when."""

    def __init__(
        self,
        picture: Picture,
        top: float,
        names: Sequence[str],
        *,
        left: float = 15,
        step: float = 3.2,
        gaps: Sequence[tuple[int, float]] = (),
    ) -> None:
        """Lanes below each other, with a gap in front of some of them; time goes from 0 to 100."""
        self.picture, self.left, self.step = picture, left, step
        self.tops = [top + i * step + sum(room for lane, room in gaps if lane <= i) for i in range(len(names))]
        for y, name in zip(self.tops, names, strict=True):
            picture.text(1, y + step / 2, name)
            picture.line((left, y + step / 2), (WIDTH - 1, y + step / 2))

    def x(self, time: float) -> float:
        return self.left + time * (WIDTH - 1 - self.left) / 100

    def do(self, lane: int, start: float, stop: float, text: str, kind: str, *, size: float = SIZE) -> Box:
        x, y = self.x(start), self.tops[lane] + 0.4
        return self.picture.box(x, y, self.x(stop) - x, self.step - 0.8, text, kind, size=size)

    def ring(self, lanes: Sequence[int], stages: Iterable[tuple[float, float]], reading: float) -> None:
        """Stages of a ring, a lane for each: when the copy of a stage begins, and when it begins to be read."""
        last = 98  # what begins later is not drawn
        for stage, (start, used) in enumerate(stages):
            lane = lanes[stage % len(lanes)]
            if start < last:
                self.do(lane, start, min(used - 0.4, last), f"arrives: {stage}", "wait", size=8)
            if used < last:
                self.do(lane, used + 0.6, used + reading, f"read: {stage}", "plain", size=8)

    def mark(self, time: float, first: int, last: int) -> None:
        """A barrier that all of some lanes meet at."""
        x = self.x(time)
        self.picture.line((x, self.tops[first]), (x, self.tops[last] + self.step), dashed=True)
