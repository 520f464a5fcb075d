"""What scripts with sections share: options of a run, what could not be measured, the way through the sections."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import Table, machine, writing

Row = dict[str, Any]


def number(value: float | None, width: int, digits: int = 1) -> str:
    """A right-aligned number, or "-"."""
    return f"{'-' if value is None else f'{value:.{digits}f}':>{width}}"


def mark(reached: bool | None) -> str:
    return {True: "yes", False: "no", None: ""}[reached]


@dataclass
class Bench:
    """The options of a run, and what could not be measured."""

    quick: bool = False
    with_peers: bool = True
    missing: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    #: What is not installed, and what of it was said: once in a run is enough.
    absent: set[str] = field(default_factory=set)
    said: set[str] = field(default_factory=set)

    def some(self, everything: Sequence[Any], quick: Sequence[Any]) -> Sequence[Any]:
        """What this run takes of a list."""
        return quick if self.quick else everything

    def attempt(self, what: str, where: str, function: Callable[[], Any]) -> Any:
        """The function's result, or None with its reason kept: what is not there must not stop a run."""
        try:
            return function()
        except Exception as error:
            reason = str(error).strip().split("\n")[0][:160]
            text = f"{what}: {type(error).__name__}: {reason}"
            if text not in self.said:
                self.missing[text].append(" ".join(where.split()))
            if isinstance(error, ImportError):
                self.absent.add(text)
            return None

    def explain(self, table: Table) -> None:
        """Print why there is a "-" where there is one."""
        for reason, cases in self.missing.items():
            more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
            table.note(f"  - {reason} ({cases[0]}{more})")
        self.missing.clear()
        self.said |= self.absent


#: Name of a section -> (title, what measures it)
Sections = dict[str, tuple[str, Callable[[Any, Table], None]]]


def arguments(about: str | None, sections: Sections) -> argparse.ArgumentParser:
    """The command line that these scripts have in common."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="?", choices=[*sections, "all"], default="table", help="default: table")
    parser.add_argument("--quick", action="store_true", help="a subset, 5 repeats; bench/results/ is left alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to this file")
    return parser


def run_sections(
    script: str, sections: Sections, options: argparse.Namespace, bench: Bench, backend: str, keep: bool,
    ahead: Callable[[Table, Sequence[str]], None] | None = None,
) -> None:  # fmt: skip
    """Measure the chosen sections one by one, and write each as soon as it ends, in whatever way.

    `keep` is to write bench/results/; `ahead` is called before the first section. A section that fails does not stop
    the others. SIGTERM, which `timeout` sends, ends a run as an interrupt does: what was measured is written.
    """
    start = time.perf_counter()
    names = list(sections) if options.section == "all" else [options.section]
    written: dict[str, list[Row]] = {}
    failed = []
    for name in names:
        title, section = sections[name]
        table = Table(f"{script}_{name}_{backend}", title)
        written[name] = table.rows
        interrupted = False
        try:
            with writing(table, keep):
                try:
                    if ahead is not None and name == names[0]:
                        ahead(table, names)
                    section(bench, table)
                finally:
                    bench.explain(table)
        except KeyboardInterrupt:
            interrupted = True
        except Exception:
            traceback.print_exc()
            failed.append(name)
        if options.json:
            options.json.write_text(json.dumps({"machine": machine()} | written, indent=1) + "\n")
        if interrupted:
            raise SystemExit("interrupted")
    print(f"{time.perf_counter() - start:.0f} s")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
