"""Draws the pictures of docs/linear-examples.md: ``python docs/draw_examples.py [--folder F] [name...]``.

The Python blocks of the page are run in their order. A line ``<!-- picture: NAME -->`` saves the figure that the blocks
before it have made as NAME.png.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent / "linear-examples.md"
FOLDER = PAGE.parent / "pictures" / "examples"
#: Dots for an inch: the widest picture has 600 pixels.
DOTS = 100
_PART = re.compile(r"^```python\n(?P<code>.*?)^```$|^<!-- picture: (?P<name>\w+) -->$", re.MULTILINE | re.DOTALL)


def names(page: str) -> list[str]:
    """The pictures that a page asks for."""
    return [part["name"] for part in _PART.finditer(page) if part["name"]]


def figures(page: str) -> Iterator[tuple[str, Any]]:
    """Run the blocks of a page; yield the name and the figure of each picture, and close the figure after that."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    known: dict[str, Any] = {"__name__": "__main__"}
    plt.close("all")
    for part in _PART.finditer(page):
        if part["code"]:
            exec(compile(part["code"], str(PAGE), "exec"), known)
            continue
        numbers = plt.get_fignums()
        if len(numbers) != 1:
            raise ValueError(f"{part['name']}: wanted one figure before the picture, got {len(numbers)}")
        yield part["name"], plt.figure(numbers[0])
        plt.close("all")


def main(argv: Sequence[str] | None = None) -> None:
    """Draw all pictures of the page, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="all by default")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args(argv)
    page = PAGE.read_text(encoding="utf-8")
    unknown = set(options.names) - set(names(page))
    if unknown:
        parser.error(f"no such picture: {', '.join(sorted(unknown))}")
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures(page):
        if not options.names or name in options.names:
            figure.savefig(options.folder / f"{name}.png", dpi=DOTS, bbox_inches="tight", metadata={"Software": None})


if __name__ == "__main__":
    main()
