"""One page of HTML from a file of results: ``python -m bsrgemm report results.json -o report.html``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="a page of HTML from a file that bench wrote",
        description="Write one page with tables, pictures, environment and the command that measured it. It opens "
        "from disk: nothing beside the file is needed. Pictures need matplotlib.",
    )
    parser.add_argument("results", type=Path, help="a file of `bench --json`")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="default: the same name, .html")
    parser.set_defaults(command=lambda args: _run(parser, args))


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from .._benchmark import results
    from .._benchmark.show import page

    out: Path = args.out or args.results.with_suffix(".html")
    if not out.parent.is_dir():
        parser.error(f"--out: {out.parent} is not a folder")
    if out.resolve() == args.results.resolve():
        parser.error(f"--out: {out} is the file of results")
    try:
        found = results.read(args.results)
    except ValueError as error:
        parser.error(str(error))
    pictures = page.drawn(found)
    out.write_text(page.page(found, found.get("command", ""), pictures), encoding="utf-8")
    print(f"written: {out}{'' if pictures else ' (without pictures: they need matplotlib, or more rows)'}")
    return 0
