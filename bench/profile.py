"""One call of a study under NVIDIA Nsight Compute: ``python -m bench profile products --block 64 -- --set full``.

ncu starts this command again with ``--inside``: the operands of the first case, a few calls that compile and plan, then
one call between cudaProfilerStart and cudaProfilerStop, which is all that ncu sees. Options after ``--`` are ncu's own;
its duration is no benchmark, since it runs a kernel several times, with flushed caches and a clock that it sets.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from .place import Place

#: What ncu is asked for where no options are given: the busiest units, occupancy, and what warps wait for
_SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "Occupancy", "WarpStateStats")
_WARM_UPS = 3


def command(ncu: str, words: Sequence[str], options: Sequence[str]) -> list[str]:
    """The command line of ncu."""
    options = list(options) or [word for section in _SECTIONS for word in ("--section", section)]
    child = [sys.executable, "-m", "bench", "profile", *words, "--inside"]
    return [ncu, "--target-processes", "all", "--profile-from-start", "off", *options, *child]


def inside(case: Any, place: Place) -> None:
    """What ncu runs."""
    import cupyx.profiler

    call = case.ready(place).call
    for _ in range(_WARM_UPS):
        call()
    place.synchronize()
    with cupyx.profiler.profile():
        call()
        place.synchronize()


def main(argv: Sequence[str] | None = None) -> int:
    """Start ncu; its exit status."""
    from .__main__ import add_sizes, chosen, sizes_of

    words = list(sys.argv[2:] if argv is None else argv)
    words, options = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(
        prog="python -m bench profile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", help="a study with cases; its first case is looked at")
    add_sizes(parser)
    parser.add_argument("--ncu", metavar="PATH", default="ncu", help="the program, if it is not on PATH")
    parser.add_argument("--dry-run", action="store_true", help="only print the command line of ncu")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    try:
        (study,) = chosen([args.study], "cuda", sizes_of(args))
        if study.cases is None:
            raise ValueError(f"{args.study} has no cases; products, vectors and attention have")
    except ValueError as error:
        parser.error(str(error))
    if args.inside:
        place = Place("cuda", quick=True)
        inside(study.cases(place)[0], place)
        return 0
    program = args.ncu if args.dry_run else shutil.which(args.ncu)
    if program is None:
        parser.error(f"--ncu: there is no program {args.ncu!r}; it is NVIDIA Nsight Compute, of the CUDA toolkit")
    found = command(program, [word for word in words if word != "--dry-run"], options)
    if args.dry_run:
        print(shlex.join(found))
        return 0
    os.execv(program, found)
