"""Repeat gradients of attention on a card, with pauses in the kernel: ``python -m tests.soak.repeats --count 1000``.

The default order of sums promises the same bits each time. Here the warps of the kernel for Hopper pause for random
times of up to some microseconds where they hand work to each other, so that they meet in ever other orders. The first
result that differs ends the run.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import bsrgemm as bg
from bsrgemm._kernels import jit, sources

#: Before each of these lines of a source, a warp pauses in one of four cases.
PLACES = {
    "common/attention_backward_turns.cuh": (
        "wait(shared.q_empty[slot], phase);",
        "wait(shared.turn_full[n % kTurns], parity<kTurns>(n));",
    ),
    "attention_backward_sm90.cu": (
        "wait(shared.dq_full[0][n % 2], parity<2>(n));",
        "add_release(p.turns + piece, 1);",
        "wait(shared.q_full[slot], parity<kSlots>(n));",
        "wait(shared.dq_empty[group], (kGroups == 2 ? n & 1 : half) ^ 1);",
    ),
    "attention_backward_keys_sm90.cu": (
        "wait(shared.q_full[slot], parity<kSlots>(n));",
        "wait(shared.weights_full, n & 1);",
        "wait(shared.weights_empty, (n & 1) ^ 1);",
    ),
    "attention_backward_queries_sm90.cu": (
        "wait(shared.k_full[slot], parity<kSlots>(n));",
        "wait(shared.v_full, n & 1);",
    ),
}
PAUSE = """
__device__ __forceinline__ void pause() {
  u32 x = clock() * 0x9e3779b9u + blockIdx.x * 0x85ebca6bu;
  x = __shfl_sync(__activemask(), x ^ x >> 15, __ffs(__activemask()) - 1);
  if ((x & 3) == 0) __nanosleep(x >> 4 & 4095);
}
"""
#: The source that all of these include, and what it begins with after its includes.
SHARED, FIRST = "common/attention_backward_turns.cuh", "struct Turn {"


def add_pauses(folder: Path) -> None:
    """Put a pause before each of PLACES in the sources of a folder."""
    for source, places in PLACES.items():
        text = (folder / source).read_text()
        for place in places:
            if place not in text:
                raise SystemExit(f"{source} has no line {place!r}: update PLACES")
            text = text.replace(place, f"pause(); {place}")
        if source == SHARED:
            text = text.replace(FIRST, f"{PAUSE}\n{FIRST}", 1)
        (folder / source).write_text(text)


@contextlib.contextmanager
def paused(folder: Path) -> Iterator[None]:
    """Load kernels from a folder instead."""
    load = jit.load
    jit.load = lambda spec, arch: load(spec, arch, root=folder)  # type: ignore[assignment]
    try:
        yield
    finally:
        jit.load = load  # type: ignore[assignment]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="calls for each case")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    import cupy

    rng = cupy.random.default_rng(options.seed)
    mask = bg.BlockMask.random(2048, 2048, per_row=5, block=128, heads=(1, 8), seed=options.seed).to_device("cuda")
    cases: tuple[tuple[str, int, int, int, dict[str, Any]], ...] = (
        ("causal, 8 on 2 heads", 8, 2, 128, {"causal": True}),
        ("window, 64 columns", 4, 4, 64, {"window": (500, 100)}),
        ("random blocks", 8, 8, 128, {"mask": mask}),
        ("causal, 256 columns", 4, 4, 256, {"causal": True}),
        ("random blocks, 192 columns", 8, 8, 192, {"mask": mask}),
    )
    with TemporaryDirectory() as name:
        folder = Path(name) / "cuda"
        shutil.copytree(sources.cuda_root(), folder)
        add_pauses(folder)
        for what, heads, kv_heads, D, band in cases:
            shapes = ((heads, 2048, D), (kv_heads, 2048, D), (kv_heads, 2048, D), (heads, 2048, D))
            q, k, v, dout = (rng.standard_normal((1, *s), np.float32).astype(np.float16) for s in shapes)
            out, lse = bg.attention(q, k, v, return_lse=True, **band)
            want = bg.attention_backward(dout, q, k, v, out, lse, **band)  # by the kernel without pauses
            began = time.perf_counter()
            with paused(folder):
                for i in range(options.count):
                    got = bg.attention_backward(dout, q, k, v, out, lse, **band)
                    for x, y in zip(got, want, strict=True):
                        if not bool((x.view(np.uint16) == y.view(np.uint16)).all()):
                            print(f"{what}: other bits in call {i}")
                            return 1
            seconds = time.perf_counter() - began
            print(f"{what}: {options.count} calls with pauses, the same bits ({seconds:.1f} s)", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
