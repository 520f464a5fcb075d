"""Masked attention, softmax(scale q k^T) v: how fast and how exact, beside its peers.

Rate = 4 * head dim * pairs of query and key that are allowed / time (so half of it for causal). Ours and its peers are
timed in turn (`bsrgemm._benchmark.timing` says how), and with them cF: cuDNN without a mask at (1, 16, 16384, 128). A
result is checked against float64 in a few tiles of queries before it is timed. Without a GPU the same runs on the
CPU, smaller, beside plain NumPy.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..runner import Script, Sections
from .attention_decode import section_decode
from .attention_host import section_host
from .attention_run import bench_of, compile_ahead
from .attention_speed import section_small, section_table
from .attention_studies import section_accuracy, section_density, section_long

SECTIONS: Sections = {
    "table": ("Attention, TFLOP/s", section_table),
    "small": ("Attention of many small heads", section_small),
    "decode": ("Attention of one token on a KV cache", section_decode),
    "long": ("Attention on long sequences", section_long),
    "density": ("Attention by density of random blocks", section_density),
    "accuracy": ("Attention on hard inputs", section_accuracy),
    "host": ("Cost of a call and of a mask", section_host),
}


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--flex", action="store_true", help="also FlexAttention, which torch compiles (minutes)")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    Script("attention", __doc__, SECTIONS, bench=bench_of, more=_more, ahead=compile_ahead).main(argv)
