"""The emulator itself: it says where threads stand still, what is written outside, and how numbers are rounded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest

from bsrgemm._kernels.jit import KernelSpec

from . import emulator
from .emulator import put
from .forked import forked


def kernel(text: str, folder: Path, races: bool = False) -> emulator.Kernel:
    """The kernel `tiny` of a source that is given as it is."""
    texts = {name: (emulator.HERE / name).read_text() for name in emulator.HEADERS}
    with patch.object(emulator, "_sources", lambda source: texts | {"tiny.cu": emulator._translated(text)}):
        return emulator.compiled(KernelSpec("tiny.cu", "tiny"), folder, races=races)


def ended(text: str, folder: Path, shared: int = 0, races: bool = False) -> str:
    """What a process says that launches 64 threads of a kernel and ends early."""
    status, said = forked(lambda: kernel(text, folder, races)((1,), (64,), (), shared))
    assert status != 0
    return said


def test_threads_that_all_wait_are_named(folder: Path) -> None:
    said = ended('extern "C" void tiny() { if (threadIdx.x < 32) __syncthreads(); }', folder)
    assert "all threads of CTA 0, 0, 0 wait" in said
    assert "threads 0 to 31: __syncthreads" in said and "threads 32 to 63: have ended" in said


def test_writes_behind_shared_memory_are_found(folder: Path) -> None:
    text = 'extern "C" void tiny() { extern __shared__ char memory[]; if (threadIdx.x == 0) memory[100] ^= 1; }'
    assert "a write beyond the end of shared memory" in ended(text, folder, 100)


@pytest.mark.parametrize("call", ["__shfl_sync(1u, 0, 0)", "__any_sync(0u, true)", "__match_any_sync(~0u - 1, 3u)"])
def test_shuffles_and_votes_are_those_of_all_lanes(call: str, folder: Path) -> None:
    assert "without some lanes of a warp" in ended(f'extern "C" void tiny() {{ {call}; }}', folder)


@pytest.mark.parametrize(
    "statement",
    [
        "int x[4]; for (int i = 0; i <= 4; ++i) x[i] = i;",
        "alignas(8) short x[4]; *reinterpret_cast<int*>(x + odd) = 1;",
        "struct { int before[4], x[4]; } y; for (int i = 0; i < 4; ++i) y.x[i - odd] = i;",  # the last one of a struct
    ],
)
def test_places_outside_of_arrays_and_between_vectors_end_the_process(statement: str, folder: Path) -> None:
    if "struct" in statement and "clang" in emulator._compiler()[-1]:
        pytest.skip("clang++ takes an array at the end of a struct for one of any length")
    ended(f'extern "C" void tiny() {{ volatile int odd = 1; {statement} }}', folder)


@pytest.mark.parametrize("numbers", ["8, 16, 1024", "0, 15, 1024", "0, 16, 1025"])
def test_descriptors_of_places_that_they_cannot_name_end_the_process(numbers: str, folder: Path) -> None:
    """A descriptor has addresses and distances in units of 16 bytes; what is between them would be dropped."""
    header = (emulator.HERE / "emulated_wgmma.h").read_text().replace("#pragma once", "")
    text = (
        f'#define MMA_TYPE f16\n#define MMA_K 16\n{header}\nextern "C" void tiny() {{ wgmma_descriptor({numbers}); }}'
    )
    assert "a descriptor without its last four bits" in ended(text, folder)
    kernel(text.replace(numbers, "32, 16, 1024"), folder)((1,), (64,), ())


#: Statements in which two threads touch the same place, what must stand at `...` lest they race, and what is no order.
RACES = {
    "read after write": ("cell[t] = t; ... out[t] = cell[t ^ 1];", "__syncwarp();", "__shfl_sync(~0u, t, 0);"),
    "write after read": ("out[t] = cell[t ^ 1]; ... cell[t] = t;", "__syncwarp();", "__ballot_sync(~0u, t > 3);"),
    "two writes": ("cell[t] = t; ... cell[t ^ 1] = 100 + t;", "__syncwarp();", "bool p; emulator::elect_sync(p, 0);"),
    "another warp": ("cell[t] = t; ... out[t] = cell[t ^ 32];", "__syncthreads();", "__syncwarp();"),
    "a copy": ("COPY WAIT ... out[t] = cell[t ^ 1];", "__syncwarp();", ""),
    "a copy of its own": ("COPY ... out[t] = cell[t];", "WAIT", "__syncthreads();"),
    "a copy to what is read": ("out[t] = cell[t ^ 1]; ... COPY WAIT", "__syncwarp();", "__shfl_sync(~0u, t, 0);"),
    "a barrier": ("BARRIER cell[t] = t; ... out[t] = cell[t ^ 32];", "ARRIVE AWAIT", "ARRIVE"),
    "what is there already": ("cell[0] = 5; ...", "", None),
    "atomic operations": ("atomicAdd(cell, 1u); ... atomicAdd(cell, 1u);", "", None),
}
WORDS = {
    "COPY": "emulator::cp_async_ca_shared_global(shared(cell + t), from + t, 4u); emulator::cp_async_commit_group();",
    "WAIT": "emulator::cp_async_wait_group(0);",
    "BARRIER": "if (t == 0) emulator::mbarrier_init_shared_cta_b64(shared(&barrier), 64); __syncthreads();",
    "ARRIVE": "emulator::mbarrier_arrive_shared_cta_b64(shared(&barrier));",
    "AWAIT": "bool done; emulator::mbarrier_try_wait_parity_shared_cta_b64(done, shared(&barrier), 0);",
}


@pytest.mark.parametrize("name", RACES)
def test_races_are_found_where_nothing_orders_two_accesses(name: str, folder: Path) -> None:
    if not emulator.can_watch_races():
        pytest.skip("races are watched in kernels that g++ compiles")
    statements, order, no_order = RACES[name]

    def text(between: str) -> str:
        inside = statements.replace("...", between)
        for word, meaning in WORDS.items():
            inside = re.sub(rf"\b{word}\b", meaning, inside)
        return f"""
static unsigned from[64];
inline unsigned shared(const void* x) {{ return unsigned(__cvta_generic_to_shared(x)); }}
extern "C" void tiny() {{
  extern __shared__ unsigned cell[];
  unsigned* out = cell + 64;
  unsigned long& barrier = *reinterpret_cast<unsigned long*>(cell + 128);
  const unsigned t = threadIdx.x;
  {inside}
}}"""

    if no_order is not None:
        assert "a race: thread" in ended(text(no_order), folder, 520, races=True)
    kernel(text(order), folder, races=True)((1,), (64,), (), 520)


def test_shared_memory_holds_anything_at_first_and_lanes_come_in_any_order(folder: Path) -> None:
    text = """
extern "C" void tiny(int* first, int* order) {
  __shared__ int cell, count;
  if (threadIdx.x == 0) first[blockIdx.x] = cell, count = 0;
  __syncthreads();
  order[blockIdx.x * 32 + threadIdx.x] = atomicAdd(&count, 1);
}"""
    run, first, order = kernel(text, folder), put(np.zeros(4, np.int32)), put(np.zeros((4, 32), np.int32))
    results = []
    for seed in ("1", "1", "2"):
        with patch.dict("os.environ", BSRGEMM_EMULATOR_SEED=seed):
            run((4,), (32,), (first, order))
        results.append((first.tolist(), order.tolist()))
    assert len(set(first.tolist())) == 4 and len({tuple(x) for x in order.tolist()}) > 1
    assert results[0] == results[1] != results[2]


def test_numbers_are_rounded_as_by_numpy(folder: Path) -> None:
    text = """
extern "C" void tiny(const double* x, unsigned short* half, unsigned short* bfloat, unsigned short* eight, int n) {
  for (int i = threadIdx.x; i < n; i += 32) {
    emulator::cvt_rn_f16_f64(half[i], x[i]);
    bfloat[i] = emulator::to_bf16(float(x[i]));
    emulator::cvt_rn_satfinite_e4m3x2_f32(eight[i], 0.f, float(x[i]));
  }
}"""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float64)
    every = np.sort(every[np.isfinite(every)])
    x = np.concatenate([every, (every[1:] + every[:-1]) / 2, every * (1 + 2.0**-30), every * 1.3, [1e9, -1e9]])
    x = x.astype(np.float32).astype(np.float64)
    half, bfloat, eight = (put(np.zeros(len(x), np.uint16)) for _ in range(3))
    kernel(text, folder)((1,), (32,), (put(x), half, bfloat, eight, np.int32(len(x))))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(half, x.astype(np.float16).view(np.uint16))
    np.testing.assert_array_equal(bfloat, x.astype(ml_dtypes.bfloat16).view(np.uint16))
    cut = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(eight, cut)
    back: Any = [(put(np.arange(2**16, dtype=np.uint16)), put(np.zeros(2**16, np.float32))) for _ in range(2)]
    text = 'extern "C" void tiny(const unsigned short* x, float* y, float* z) { for (int i = threadIdx.x; i < 65536; '
    text += "i += 32) y[i] = emulator::from_f16(x[i]), z[i] = emulator::from_e4m3(x[i] & 255); }"
    kernel(text, folder)((1,), (32,), (back[0][0], back[0][1], back[1][1]))
    np.testing.assert_array_equal(back[0][1], np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32))
    bytes_ = (np.arange(2**16) & 255).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(back[1][1], bytes_)
