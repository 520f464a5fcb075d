"""The tables of results in bench/RESULTS.md and README.md, made from bench/results/*.json between markers.

<!-- results:gemm --> stands for all tables of a group, <!-- results:gemm:head --> for its few rows in the README.
Without an option both files are rewritten in place; with --check nothing is written, and the exit status is 1 where
they differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bsrgemm._benchmark.show.contents import GROUPS, group_text, headline_text
from bsrgemm._benchmark.show.headline import HEADLINES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
FILES = (ROOT / "README.md", ROOT / "bench" / "RESULTS.md")


def markers(marker: str) -> tuple[str, str]:
    return f"<!-- results:{marker} -->", f"<!-- /results:{marker} -->"


def between(text: str, marker: str) -> str | None:
    """What stands between the two markers, if they are there once each and in order."""
    first, last = markers(marker)
    if text.count(first) != 1 or text.count(last) != 1 or text.index(first) > text.index(last):
        return None
    return text.split(first)[1].split(last)[0]


def filled(text: str, results: Path) -> tuple[str, list[str]]:
    """A page with the tables of these results, and the groups that it lacks."""
    missing = []
    for name in GROUPS:
        makers = {name: group_text} | ({f"{name}:head": headline_text} if name in HEADLINES else {})
        there = [marker for marker in makers if between(text, marker) is not None]
        if not there:
            missing.append(name)
        for marker in there:
            first, last = markers(marker)
            before, rest = text.split(first)
            text = f"{before}{first}\n\n{makers[marker](name, results)}\n\n{last}{rest.split(last)[1]}"
    return text, missing


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if README and results differ")
    parser.add_argument("--readme", type=Path, nargs="+", default=FILES, metavar="FILE")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(argv)
    return max(update(path, options.results, options.check) for path in options.readme)


def update(path: Path, results: Path, check: bool) -> int:
    """Rewrite one file, or look at it; the exit status."""
    old = path.read_text(encoding="utf-8")
    new, missing = filled(old, results)
    if len(missing) == len(GROUPS):
        print(f"{path.name} has no markers {markers('gemm')[0]} ... {markers('gemm')[1]}", file=sys.stderr)
        return 1
    if new == old:
        print(f"{path.name} agrees with the results")
        return 0
    if check:
        print(f"{path.name} and the results differ: run python bench/publish/tables.py", file=sys.stderr)
        return 1
    path.write_text(new, encoding="utf-8")
    print(f"written: {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
