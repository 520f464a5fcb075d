"""C = A B for a block-sparse A on an NVIDIA GPU: how fast and how exact, beside dense cuBLAS and other peers.

Effective rate = 2 * stored elements * columns of B / time; ratio = to the rate of dense cuBLAS on random data in the
same run. All candidates of a case are timed in turn (`bsrgemm._benchmark.timing` says how). A result is checked against
float64 before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..runner import Script
from .gemm_ahead import compile_ahead
from .gemm_cases import Bench
from .gemm_sections import SECTIONS


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tune-torch", action="store_true", help="tune torch for the headline cases (minutes)")


def _bench(options: argparse.Namespace) -> Bench:
    return Bench(options.quick, not options.no_peers, options.device, tune_torch=options.tune_torch)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    Script("gemm", __doc__, SECTIONS, bench=_bench, more=_more, ahead=compile_ahead, needs_gpu=True).main(argv)
