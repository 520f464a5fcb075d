"""C = A B for a block-sparse A on an NVIDIA GPU: how fast and how exact, beside dense cuBLAS and other peers.

Effective rate = 2 * stored elements * columns of B / time; ratio = to the rate of dense cuBLAS on random data in the
same run. Medians by CUDA events, L2 flushed, 0.25 s of idling before each timing: a card throttles at its power limit
and remembers what ran before (0.12 s before peers and calls below 0.2 ms, which heat little). Dense cuBLAS is timed
right before and right after ours, and its mean taken. A result is checked against float64 before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import report
from gemm_ahead import compile_ahead
from gemm_cases import Bench
from gemm_sections import SECTIONS
from harness import has_gpu


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = report.arguments(__doc__, SECTIONS)
    parser.add_argument("--no-peers", action="store_true", help="only dense cuBLAS beside ours")
    parser.add_argument("--tune-torch", action="store_true", help="tune torch for the headline cases (minutes)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    if not has_gpu():
        raise SystemExit("bench/gemm.py measures tensor cores: it needs a GPU; bench/matmul.py runs anywhere")
    bench = Bench(options.quick, not options.no_peers, tune_torch=options.tune_torch)
    ahead = partial(compile_ahead, bench)
    report.run_sections("gemm", SECTIONS, options, bench, "cuda", not options.quick, ahead)


if __name__ == "__main__":
    main()
