"""One call of a study under NVIDIA Nsight Compute: ``python -m bench profile products --block 64 -- --set full``.

ncu starts this command again with ``--inside``: the operands of the first case, a few calls that compile and plan, then
one call between cudaProfilerStart and cudaProfilerStop, which is all that ncu sees. Options after ``--`` are ncu's own.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from .place import Place

#: What ncu is asked for where no options are given: the busiest units, occupancy, and what warps wait for
_SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "Occupancy", "WarpStateStats")


def main(argv: Sequence[str]) -> int:
    """Start ncu, or be what it runs; the exit status."""
    from .__main__ import add_sizes, chosen, sizes_of

    words = list(argv)
    words, options = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(
        prog="python -m bench profile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", help="a study with cases; its first case is looked at")
    add_sizes(parser)
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
        import cupyx.profiler

        place = Place("cuda", quick=True)
        call = study.cases(place)[0].ready(place).call
        for _ in range(3):  # the first ones compile and plan
            call()
        place.synchronize()
        with cupyx.profiler.profile():
            call()
            place.synchronize()
        return 0
    options = options or [word for section in _SECTIONS for word in ("--section", section)]
    child = [sys.executable, "-m", "bench", "profile", *(word for word in words if word != "--dry-run"), "--inside"]
    command = ["ncu", "--target-processes", "all", "--profile-from-start", "off", *options, *child]
    if args.dry_run:
        print(shlex.join(command))
        return 0
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        parser.error(
            "there is no program ncu on the PATH: it is NVIDIA Nsight Compute, which comes with the CUDA toolkit"
        )
