"""Masked attention, softmax(scale q k^T) v: how fast and how exact, beside its peers.

Rate = 4 * head dim * pairs of query and key that are allowed / time (so half of it for causal). Medians by CUDA events,
L2 flushed, 0.3 s of idling before each timing: a card throttles at its power limit and remembers what ran before. Ours
is timed before and after the peers, and the mean taken; cF is cuDNN without a mask at (1, 16, 16384, 128), timed in
between. A result is checked against float64 in a few tiles of queries before it is timed. Without a GPU the same runs
on the CPU, smaller, beside plain NumPy.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import report
from attention_bench import Bench, compile_ahead
from attention_cases import device
from attention_speed import section_decode, section_small, section_table
from attention_studies import section_accuracy, section_density, section_host, section_long
from harness import on_gpu
from report import Sections

SECTIONS: Sections = {
    "table": ("Attention, TFLOP/s", section_table),
    "small": ("Attention of many small heads", section_small),
    "decode": ("Attention of one token on a KV cache", section_decode),
    "long": ("Attention on long sequences", section_long),
    "density": ("Attention by density of random blocks", section_density),
    "accuracy": ("Attention on hard inputs", section_accuracy),
    "host": ("Cost of a call and of a mask", section_host),
}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = report.arguments(__doc__, SECTIONS)
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--flex", action="store_true", help="also FlexAttention, which torch compiles (minutes)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    bench = Bench(options.quick, not options.no_peers, flex=options.flex)
    ahead = partial(compile_ahead, bench) if on_gpu() else None
    keep = on_gpu() and not options.quick
    report.run_sections("attention", SECTIONS, options, bench, device(), keep, ahead)


if __name__ == "__main__":
    main()
