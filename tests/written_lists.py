"""Lists in text files of what the package chooses or starts, and their comparison with what it does now.

A file has sections, ``# name``, and lines ``key -> value``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

Section = Callable[[], Iterator[tuple[str, str]]]


def read(path: Path) -> dict[str, dict[str, str]]:
    """Return the lines of each section."""
    found: dict[str, dict[str, str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            some = found.setdefault(line[2:], {})
        else:
            key, _, value = line.partition(" -> ")
            some[key] = value
    return found


def digest(lines: list[str]) -> str:
    """A value for a section that stands for many lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def compare(path: Path, name: str, make: Section) -> None:
    """Fail unless a section is what was written down."""
    want, found = read(path)[name], dict(make())
    assert list(found) == list(want)
    differing = [f"{key}\n  was {want[key]}\n  is  {found[key]}" for key in found if found[key] != want[key]]
    assert not differing, f"{len(differing)} lines differ:\n" + "\n".join(differing[:20])


def write(path: Path, sections: Mapping[str, Section]) -> None:
    """Write down all sections as they are now."""
    out = []
    for name, make in sections.items():
        out += [f"# {name}", *(f"{key} -> {value}" for key, value in dict(make()).items())]
    path.write_text("\n".join(out) + "\n", encoding="utf-8")
