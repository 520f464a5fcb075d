"""Draws the pictures of docs/kernels: ``python docs/draw_kernels.py [--folder F] [--format png] [kernel...]``.

One vocabulary for all of them, in draw_shapes.py: boxes in a color for each kind of work, lanes with time running to
the right, arrows for barriers and data, grids of blocks. The modules that are imported here have a function for each
kernel.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import draw_attention_kernels  # noqa: E402
import draw_backward_kernels  # noqa: E402
import draw_dense_products  # noqa: E402
import draw_sparse_products  # noqa: E402
from draw_shapes import Picture  # noqa: E402

FOLDER = HERE / "pictures" / "kernels"
PICTURES: dict[str, Callable[[], Picture]] = {
    **draw_dense_products.PICTURES,
    **draw_sparse_products.PICTURES,
    **draw_attention_kernels.PICTURES,
    **draw_backward_kernels.PICTURES,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernels", nargs="*", help="all by default")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.kernels or PICTURES:
        PICTURES[name]().save(options.folder / f"{name}.{options.format}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
