"""``python -m bench``: studies, measured here; ``cliffs`` and others are commands of their own."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import machine, report, studies
from .measure import Run, reason_of
from .place import Place
from .report import Screen
from .study import Sizes, Study, resized

KINDS = ("float16", "bfloat16", "e4m3", "tf32", "float32", "float64")
#: Modules whose `main` is a command
COMMANDS = ("cliffs", "compare", "publish", "profile")
#: What a shell reports for a process that an interrupt ended: 128 + SIGINT
INTERRUPTED = 130
_EPILOG = """commands of their own, each with --help:
  python -m bench cliffs             the whole surface at random: where does the cost jump?
  python -m bench compare OLD NEW    two checkouts, the same cases in turn: what got slower?
  python -m bench publish            tables and pictures of bench/results, in the README and bench/RESULTS.md
  python -m bench profile STUDY      one call under NVIDIA Nsight Compute"""


def parser() -> argparse.ArgumentParser:
    """The options of a measurement."""
    found = argparse.ArgumentParser(
        prog="python -m bench", epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Measure bsrgemm on this machine, on the GPU if there is one, beside every library that is\n"
        "installed. A result is checked against float64 before it is timed. A number under a peer is its\n"
        "time over ours; the roof is the larger of operations over the rate of a dense product and bytes\n"
        "over the bandwidth of a copy, both of this run.",
    )  # fmt: skip
    usual = ", ".join(studies.USUAL)
    found.add_argument("study", nargs="*", metavar="STUDY", help=f'names of studies, or "all"; default: {usual}')
    found.add_argument("--list", action="store_true", help="the studies, with a line each")
    found.add_argument("--quick", action="store_true", help="a few cases of each, in less than a minute")
    found.add_argument("--device", choices=["cpu", "cuda"], help="default: the GPU if there is one")
    found.add_argument("--no-peers", action="store_true", help="ours alone")
    add_sizes(found)
    found.add_argument("--out", type=Path, metavar="DIR", help="write STUDY_DEVICE.json there, also when stopped")
    found.add_argument("--commit", metavar="HASH", help="what is measured, where there is no git; + where files differ")
    return found


def add_sizes(found: argparse.ArgumentParser) -> None:
    """Options that replace the usual sizes of a study by every combination of what is given."""
    several: dict[str, Any] = {"nargs": "+", "default": [], "metavar": "N"}
    found.add_argument("--size", type=_count, help="rows of A, or length of the sequence", **several)
    found.add_argument("--block", type=_count, help="rows and columns of a block", **several)
    found.add_argument("--columns", type=_count, help="columns of B", **several)
    found.add_argument("--density", type=_density, help="share of the blocks that are there", **several)
    found.add_argument("--dtype", choices=KINDS, nargs="+", default=[])


def sizes_of(args: argparse.Namespace) -> Sizes:
    return Sizes(*(tuple(getattr(args, name)) for name in ("size", "block", "columns", "density", "dtype")))


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return value


def _density(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected more than 0 and at most 1, got {text}")
    return value


def chosen(names: Sequence[str], device: str, sizes: Sizes) -> list[Study]:
    """The studies of these names; ValueError for one that there is not, or not here."""
    if "all" in names:
        return [study for study in studies.ALL.values() if device in study.devices]
    found = []
    for name in names or studies.USUAL:
        if name not in studies.ALL:
            raise ValueError(f"there is no study {name!r}; python -m bench --list names all of them")
        study = studies.ALL[name]
        if device not in study.devices:
            raise ValueError(f"{name} is measured on {' or '.join(study.devices)} only, not on {device}")
        found.append(resized(study, sizes) if sizes else study)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return int(importlib.import_module(f".{words[0]}", __package__).main(words[1:]))
    options = parser()
    args = options.parse_args(words)
    if args.list:
        print("\n".join(study.about for study in studies.ALL.values()))
        return 0
    if args.device == "cuda" and not machine.has_gpu():
        options.error("--device cuda: there is no GPU that CuPy can use; --device cpu runs here")
    place = Place(args.device, args.quick)
    try:
        asked = chosen(args.study, place.device, sizes_of(args))
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
        for study in asked:  # a wrong size is told before anything is measured
            if study.cases:
                study.cases(place)
    except (OSError, ValueError) as error:
        options.error(str(error))
    return _measure_all(asked, args, place, ["python -m bench", *words])


def _measure_all(asked: Sequence[Study], args: argparse.Namespace, place: Place, words: Sequence[str]) -> int:
    screen, start = Screen(), time.perf_counter()
    run = Run(place, not args.no_peers, screen.say)
    screen.note(_where(place))
    bad = count = 0
    for study in asked:
        about = {
            "study": study.name, "device": place.device, "machine": machine.describe(), **machine.commit(args.commit),
            "command": " ".join(words), "quick": args.quick,
        }  # fmt: skip
        path = args.out / f"{study.name.replace('-', '_')}_{place.device}.json" if args.out else None
        rows, cut = measure(study, run, screen)
        if path and rows:
            found = about | {"roofs": place.roofs(), "rows": rows} | ({"cut": cut} if cut else {})
            report.write(path, found)
            screen.note(f"written: {path}{', in part' if cut else ''}")
        count += len(rows)
        bad += sum(report.status(row) is not None for row in rows) + bool(cut)
        if cut == "interrupted":
            return INTERRUPTED
    if run.absent:
        screen.note(f"not installed, and left out: {', '.join(run.absent)}")
    screen.note(f"{count} rows, {time.perf_counter() - start:.0f} s{f', {bad} without a result' if bad else ''}")
    return int(bool(bad))


def measure(study: Study, run: Run, screen: Screen) -> tuple[list[report.Row], str | None]:
    """The rows of a study, printed as they come, and why there are no more of them if it was cut short."""
    rows: list[report.Row] = []
    cut = None
    screen.note(f"\n{study.title[0].upper()}{study.title[1:]}")
    try:
        for row in study.rows(run):
            rows.append(row)
            screen.note(report.line(study.columns, row))
    except ImportError as error:
        run.absent[f"{study.name} ({error})"] = None
    except (KeyboardInterrupt, Exception) as error:  # one study that fails does not stop the others
        cut = "interrupted" if isinstance(error, KeyboardInterrupt) else reason_of(error)
    for text in [*report.remarks(rows), *([f"cut short: {cut}"] if cut else [])]:
        screen.note(f"- {text}")
    return rows, cut


def _where(place: Place) -> str:
    about = machine.describe()
    if place.on_gpu:
        return f"bsrgemm {about['bsrgemm']} on {about['card']}, CuPy {about['cupy']}, NVRTC {about['nvrtc']}"
    text = f"bsrgemm {about['bsrgemm']} on the CPU ({about['cpu']}, {about['cores']} cores), sizes for a CPU"
    return text if machine.has_gpu() else f"{text}: no GPU was found"


if __name__ == "__main__":
    sys.exit(main())
