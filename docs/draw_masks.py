"""Draws the pictures of docs/masks.md: ``python docs/draw_masks.py [--folder F] [--format png] [name...]``.

A line ``<!-- picture: NAME = ARGUMENTS -->`` of the page asks for NAME.svg. The Python blocks above it are run, and
ARGUMENTS, a mask and options of `BlockMask.plot`, are what their names say there: page and pictures cannot differ.
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import hashlib
import io
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bsrgemm import BlockMask

PAGE = Path(__file__).resolve().parent / "masks.md"
FOLDER = PAGE.parent / "pictures" / "masks"
#: Points: width and height, and left, bottom, width and height of the axes. With a point for each of 128 tokens the
#: coordinates are whole numbers, and files half as large. On a page 240 pixels wide: three side by side.
SIZE, AXES = (180, 190), (40, 32, 128, 128)
_SETTINGS = {
    "svg.hashsalt": "bsrgemm",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 7.5,
    "axes.titlesize": 7.5,
    "axes.linewidth": 0.6,
}
_PART = re.compile(
    r"^(?P<gpu><!-- needs a GPU -->\s+)?```python\n(?P<code>.*?)^```$"
    r"|^<!-- picture: (?P<name>\w+) = (?P<what>.*?) -->$",
    re.MULTILINE | re.DOTALL,
)


class Picture(NamedTuple):
    """What to draw: a mask, and which of its patterns."""

    name: str
    mask: BlockMask
    options: dict[str, Any]
    #: one picture of a page says what the colors mean
    legend: bool

    @property
    def description(self) -> str:
        """The mask in words, and a digest of what the pattern allows: written into the picture."""
        batch, head = (self.options.get(name, 0) for name in ("batch", "head"))
        allowed = self.mask.to_dense().reshape(*self.mask.heads, *self.mask.shape)[batch, head]
        digest = hashlib.sha256(repr((self.mask.block, allowed.shape)).encode() + np.packbits(allowed).tobytes())
        return f"{self.mask!r}, pattern {batch}, {head}, sha256 {digest.hexdigest()[:16]}"


def pictures(text: str) -> Iterator[Picture]:
    """The pictures of a page, whose Python blocks are run on the way; those that need a GPU are left out."""
    names: dict[str, Any] = {"__name__": "__main__"}
    legend = True
    for part in _PART.finditer(text):
        if part["name"]:
            mask, options = eval(f"take({part['what']})", {**names, "take": lambda mask, **options: (mask, options)})
            yield Picture(part["name"], mask, options, legend)
            legend = False
        elif not part["gpu"]:
            _run(part["code"], names)


def _run(code: str, names: dict[str, Any]) -> None:
    """A block of the page. With prompts it is a doctest: what it prints is not looked at here."""
    examples = doctest.DocTestParser().get_examples(code)
    if not examples:
        exec(compile(code, str(PAGE), "exec"), names)
    for example in examples:
        told = contextlib.suppress(Exception) if example.exc_msg else contextlib.nullcontext()
        with told, contextlib.redirect_stdout(io.StringIO()):
            exec(compile(example.source, str(PAGE), "single"), names)


def draw(picture: Picture) -> Any:
    """A matplotlib figure of the size that all pictures have."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure((SIZE[0] / 72, SIZE[1] / 72))
        ax = figure.add_axes(tuple(x / side for x, side in zip(AXES, SIZE * 2, strict=True)))
        picture.mask.plot(ax, elements=True, **picture.options)
        ax.tick_params(length=2, width=0.6, pad=2)
        if ax.get_aspect() == "auto":  # a few queries only: a strip
            ax.set_box_aspect(0.2)
        if picture.legend:
            ax.legend(loc="upper right", fontsize=6, handlelength=1.2, borderpad=0.5, framealpha=1)
    return figure


def save(picture: Picture, path: Path) -> None:
    """The same bytes every time, with the same matplotlib."""
    import matplotlib

    figure, metadata = draw(picture), {"Title": picture.name, "Description": picture.description}
    with matplotlib.rc_context(_SETTINGS):
        if path.suffix == ".svg":
            figure.savefig(path, metadata={**metadata, "Date": None, "Creator": None})
        else:
            figure.savefig(path, dpi=200)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of docs/masks.md.")
    parser.add_argument("names", nargs="*", help="pictures to draw (all)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to (%(default)s)")
    parser.add_argument("--format", default="svg", choices=["svg", "png", "pdf"], help="as what (%(default)s)")
    given = parser.parse_args(arguments)
    found = {picture.name: picture for picture in pictures(PAGE.read_text(encoding="utf-8"))}
    unknown = set(given.names) - set(found)
    if unknown:
        sys.exit(f"names: wanted some of {', '.join(found)}, got {', '.join(sorted(unknown))}")
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in given.names or found:
        path = given.folder / f"{name}.{given.format}"
        save(found[name], path)
        print(f"{path} {path.stat().st_size / 1000:.1f} KB")


if __name__ == "__main__":
    main()
