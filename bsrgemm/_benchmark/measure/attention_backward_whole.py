"""Both passes of attention: time, memory beside the gradients, sustained rates, and what single kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from bsrgemm import attention

from ..internals import launches_of_gradients
from ..table import Table
from ..timing import Call, Clock, time_sustained
from .attention_backward_cases import CASES, Case, operands, ours
from .attention_studies import peak_of

#: The cases whose whole step is measured.
WHOLE = ("full 16K", "causal 16K", "window 2048 16K", "window 2048 128K", "128-blocks .2 16K")


def run(table: Table, clock: Clock, wanted: Sequence[str] | None) -> None:
    """Add the rows of all cases, or of those whose names contain a part of `wanted`."""
    for case in CASES:
        if case.name in WHOLE and (not wanted or any(part in case.name for part in wanted)):
            _measure(table, case, clock)


def _measure(table: Table, case: Case, clock: Clock) -> None:
    x = operands(case)
    backward = ours(x)
    forward: Call = partial(attention, x.q, x.k, x.v, out=x.out, return_lse=True, **x.options)

    def both() -> Any:
        forward()
        return backward()

    both()
    peak = peak_of(backward)
    seconds = {
        name: clock.seconds(call) for name, call in (("forward", forward), ("backward", backward), ("both", both))
    }
    pairs = case.pairs(x.options.get("mask")) * case.columns
    sustained = 10 * pairs / time_sustained(backward) / 1e12
    parts = _parts(backward)
    rates = {
        name: flops * pairs / seconds[name] / 1e12 for name, flops in (("forward", 4), ("backward", 10), ("both", 14))
    }
    share = sum(time for name, time in parts.items() if name != "products") / sum(parts.values())
    # dq in float32, two statistics of each query, and a counter for each 64 queries
    least = x.q.size * 4 + x.lse.size * (8 + 4 / 64)
    table.add(
        f"{case.name:<20} forward {seconds['forward'] * 1e3:7.2f} ms, backward {seconds['backward'] * 1e3:7.2f}, both "
        f"{seconds['both'] * 1e3:7.2f} ({rates['both']:.0f} TFLOP/s); backward {rates['backward']:.0f}, back to back "
        f"{sustained:.0f}; begin and end {100 * share:.1f} %; {peak / 1e6:.1f} MB beside the gradients",
        case=case.name, seconds=seconds, rates=rates, sustained=sustained, parts=parts, share=share, peak_bytes=peak,
        least_bytes=least,
    )  # fmt: skip


def _parts(call: Call, repeats: int = 9) -> dict[str, float]:
    """Median seconds of the kernels before the products, of the products, and of those after them."""
    found: list[list[float]] = [launches_of_gradients(call) for _ in range(repeats)]
    middle = [sorted(times)[repeats // 2] for times in zip(*found, strict=True)]
    return {"begin": middle[0], "products": sum(middle[1:-1]), "end": middle[-1]}
