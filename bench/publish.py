"""The tables in README.md and bench/RESULTS.md, made from bench/results, and the pictures of docs/pictures/results.

``<!-- bench:products -->`` stands for the table of a study, ``<!-- bench:products:4 -->`` for its first four rows. With
--check nothing is written, and the exit status is 1 where a table on a page differs from its file.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import report
from .machine import ROOT
from .study import Study

RESULTS, PICTURES = ROOT / "bench" / "results", ROOT / "docs" / "pictures" / "results"
PAGES = (ROOT / "README.md", ROOT / "bench" / "RESULTS.md")
_MARKER = re.compile(r"(<!-- bench:([\w-]+)(?::(\d+))? -->\n).*?(<!-- /bench:\2 -->)", re.DOTALL)


def results_of(study: Study, folder: Path) -> dict[str, Any]:
    """What was measured: on a GPU if there is a file of one."""
    names = [folder / f"{study.name.replace('-', '_')}_{device}.json" for device in ("cuda", "cpu")]
    return report.read(next((path for path in names if path.is_file()), names[0]))


def heading(found: dict[str, Any]) -> str:
    """Card, date, commit and versions of a run in a line."""
    about = found["machine"]
    driver = about.get("driver")
    parts = [
        about.get("card") or f"{about['cpu']}, {about['cores']} cores",
        about["date"],
        f"bsrgemm {about['bsrgemm']}",
    ]
    if found.get("commit"):
        parts.append(f"commit {found['commit'][:7]}{' with changes' if found.get('dirty') else ''}")
    if driver:
        shown = f"{driver // 1000}.{driver % 1000 // 10}"
        parts += [f"CuPy {about['cupy']}", f"NVRTC {about['nvrtc']}", f"driver for CUDA {shown}"]
    peers = {re.sub(r"^nvidia-|-cu\d+$", "", name): version for name, version in about.get("peers", {}).items()}
    parts += [f"{name} {version}" for name, version in peers.items()]
    notes = [found["note"]] if "note" in found else []
    notes += [f"cut short: {found['cut']}"] if "cut" in found else []
    return "; ".join([", ".join(parts), *notes]) + "."


def filled(text: str, folder: Path) -> str:
    """A page with title, machine and table of its studies; KeyError for a study that there is not."""
    from .studies import ALL

    def section(marked: re.Match[str]) -> str:
        first, name, count, last = marked.groups()
        study, found = ALL[name], results_of(ALL[name], folder)
        table = report.markdown(report.table(study.columns, found["rows"][: int(count) if count else None]))
        return f"{first}\n**{study.title[0].upper()}{study.title[1:]}**\n\n{heading(found)}\n\n{table}\n\n{last}"

    return _MARKER.sub(section, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Write pages and pictures; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench publish", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page and its results differ")
    parser.add_argument("--no-pictures", action="store_true", help="the tables alone, without matplotlib")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES, metavar="FILE")
    parser.add_argument("--pictures", type=Path, default=PICTURES, metavar="DIR")
    options = parser.parse_args(argv)
    different = False
    for page in options.pages:
        old = page.read_text(encoding="utf-8")
        try:
            new = filled(old, options.results)
        except (KeyError, ValueError) as error:
            parser.error(f"{page.name}: {error}")
        if new == old:
            continue
        different = True
        if options.check:
            print(f"{page.name} and the results differ: run python -m bench publish", file=sys.stderr)
            continue
        page.write_text(new, encoding="utf-8")
        print(f"written: {page.name}")
    if options.check:
        return int(different)
    if not options.no_pictures:
        from . import pictures

        for path in pictures.draw_all(options.results, options.pictures):
            print(f"drawn: {path.name}")
    return 0
