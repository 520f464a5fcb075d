"""Errors written by hand: those that a review once made and no test noticed, and others of their kind.

Each has a pattern of files, the text that is replaced, which stands once in them, and what it becomes.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .sites import Site


class Error(NamedTuple):
    """In the one file that has `old`, `new` in its place."""

    what: str
    files: str
    old: str
    new: str


ERRORS: tuple[Error, ...] = ()


def place(root: Path, error: Error) -> Site | None:
    """Where an error is made; None if its text is not there exactly once."""
    found = []
    for path in sorted(root.glob(error.files)):
        text = path.read_text(encoding="utf-8")
        if error.old in text:
            found.append((path, text))
    if len(found) != 1 or found[0][1].count(error.old) != 1:
        return None
    path, text = found[0]
    start = text.index(error.old)
    end = start + len(error.old)
    lines = (text.count("\n", 0, start) + 1, text.count("\n", 0, end) + 1)
    return Site(str(path.relative_to(root)), f"by hand: {error.what}", start, end, error.new, *lines)


def sites(root: Path) -> list[Site]:
    """The errors that can be made in this tree."""
    return [site for error in ERRORS if (site := place(root, error)) is not None]
