"""The facts on the pages that a program can know: tables between markers, and values inside sentences.

``python docs/facts.py`` writes them into the pages; ``--check`` writes nothing and exits with 1 where a page differs.
A table stands between ``<!-- facts:NAME -->`` and ``<!-- /facts:NAME -->``; fact_tables.py makes them. A sentence is a
template in which ``{}`` stands for a value; wherever its words stand on its page, the values have to be those that the
function returns.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fact_tables import (
    ROOT,
    TABLES,
    constants,
    ms,
    project,
    record,
    results,
    row,
    us,
)

PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "kernels").glob("*.md")),
)
Values = Callable[[], tuple[Any, ...]]


# ---------------------------------------------------------------------------------------- sentences
@dataclass(frozen=True)
class Fact:
    """A sentence with values: where it stands, its words, and what the values are."""

    page: str
    words: str
    values: Values

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the sentence, with any blanks between words and any number or word for a value."""
        parts = [r"\s+".join(map(re.escape, part.split(" "))) for part in self.words.split("{}")]
        return re.compile(r"([\w.,^/-]*\w)".join(parts))


def python_version() -> tuple[str, ...]:
    return (str(project()["requires-python"]).removeprefix(">="),)


def cupy_version() -> str:
    (version,) = {
        re.sub(r".*>=", "", extra[0])
        for name, extra in project()["optional-dependencies"].items()
        if name.startswith("cuda")
    }
    return version


def capability() -> str:
    """The oldest compute capability that kernels are compiled for."""
    from bsrgemm._kernels import jit

    for number in range(50, 100):
        try:
            jit.target(number, range(50, 100))
        except RuntimeError:
            continue
        return f"{number // 10}.{number % 10}"
    raise AssertionError("no target")


def gpu_suite() -> tuple[str, str]:
    found = record()["suite"]
    assert not record()["partial"]
    retired = [test["outcome"] for test in record().get("retired", {}).values()]
    return f"{found['passed']:,}", f"{found['failed'] + retired.count('failed'):,}"


def out_of_memory() -> tuple[int]:
    """How many calls the soak lets run out of memory."""
    from tests.soak.memory_calls import CALLS

    return (len(CALLS),)


def bounds_of_blocks() -> tuple[Any, ...]:
    return constants("_LEAST_BLOCK", "_MOST_BLOCK")


def bounds_of_pages() -> tuple[Any, ...]:
    return constants("_LEAST_PAGE", "_MOST_PAGE")


def most_queries() -> tuple[Any, ...]:
    return constants("_MOST_QUERIES")


def power(n: int) -> str:
    assert n & (n - 1) == 0
    return f"2^{n.bit_length() - 1}"


def most_tokens() -> tuple[str, ...]:
    return tuple(power(n) for n in constants("_MOST_CAPACITY", "_MOST_ROWS"))


def timings() -> tuple[Any, ...]:
    budget, least, most = constants("_BUDGET", "_LEAST", "_MOST")
    return least, most, budget


def flushed() -> tuple[int]:
    return (constants("_FLUSH_BYTES")[0] >> 20,)


def percent(value: float) -> str:
    return f"{100 * value:g}"


def products_of_a_row() -> tuple[str]:
    """The most products in a row of A @ A2 whose hash table fits the shared memory of an H200."""
    from bsrgemm._products import spgemm_pattern

    room = 227 << 10  # bytes of shared memory that a CTA can have there

    def fits(columns: int) -> bool:
        slots, listed = spgemm_pattern._table(columns)
        return 4 * (2 * slots + listed) <= room

    return (f"{next(n for n in range(1, 1 << 20) if not fits(n + 1)):,}",)


def fp8() -> tuple[str, str]:
    """The largest fp8 number, and the smallest above 0."""
    import ml_dtypes

    about = ml_dtypes.finfo(ml_dtypes.float8_e4m3fn)
    smallest = float(about.smallest_subnormal)
    assert smallest == 2.0**-9
    return f"{float(about.max):g}", "2^-9"


def fp8_rounding() -> tuple[str]:
    """The largest relative change by rounding to fp8, as a fraction."""
    import ml_dtypes
    import numpy as np

    numbers = np.arange(0x08, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)  # from 2^-6 on
    middles = (numbers[1:] + numbers[:-1]) / 2
    return (f"1/{1 / ((numbers[1:] - numbers[:-1]) / 2 / middles).max():.0f}",)


def tf32_rounding() -> tuple[str]:
    """The largest error of a factor that the kernels round to tf32, in units of its last place."""
    import numpy as np

    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "cuda").rglob("*.cuh"))
    (factor,) = re.findall(r"__fmul_rz\(__uint_as_float\(x\), 1 \+ ([\d.]+)f / 2048\)", text)
    x = np.arange(0x3F800000, 0x40000000, 7, dtype=np.uint32).view(np.float32)  # from 1 to 2
    product = x.astype(np.float64) * (np.float32(1) + np.float32(factor) / np.float32(2048))
    nearest = product.astype(np.float32)
    rounded = np.where(nearest > product, np.nextafter(nearest, np.float32(0)), nearest)
    cut = (rounded.view(np.uint32) & ~np.uint32(0x1FFF)).view(np.float32)
    units = (abs(cut.astype(np.float64) - x) / np.where(cut < 2, 2.0**-10, 2.0**-9)).max()
    return (f"{np.ceil(100 * units) / 100:.2f}",)


def rates_by_columns() -> tuple[str, ...]:
    """The rate with 1024 columns, and the best one, for blocks 64 x 64."""
    rows = {r["columns"]: r["tflops"] for r in results("gemm_columns_cuda") if r["block"] == 64}
    return f"{rows[1024]:.0f}", f"{max(rows.values()):.0f}"


def small_problem() -> tuple[str, ...]:
    small = row("gemm_size_cuda", n=4096, block=[128, 128])
    large = row("gemm_table_cuda", n=8192, block=[128, 128], dtype="float16")
    return (
        f"{small['tflops']:.0f}",
        f"{small['dense_tflops']:.0f}",
        f"{small['density'] / small['ratio']:.2f}",
        f"{large['density'] / large['ratio']:.2f}",
    )


def host_range() -> tuple[str, str]:
    times = [r["call_seconds"] * 1e6 for r in results("overhead_cuda") if "call_seconds" in r]
    return f"{min(times):.0f}", f"{max(times):.0f}"


def host_of_all_calls() -> tuple[str, str]:
    """The least and the most microseconds of the table of host times."""
    times = [r["call_seconds"] for r in results("overhead_cuda") if "call_seconds" in r]
    times += [r["seconds"] for r in results("attention_host_cuda") if "seconds" in r]
    return f"{min(times) * 1e6:.0f}", f"{max(times) * 1e6:.0f}"


def work_lists() -> tuple[str, str]:
    times = [r["prepare_seconds"] * 1e3 for r in results("overhead_cuda") if "prepare_seconds" in r]
    return f"{min(times):.1f}", f"{max(times):.1f}"


def first_ratio(a: int, b: int) -> str:
    rates = [row("gemm_table_cuda", dtype="float16", block=[n, n])["tflops"] for n in (a, b)]
    return f"{rates[0] / rates[1]:.2f}"


def square_rates() -> tuple[str, ...]:
    rows = [row("gemm_table_cuda", dtype="float16", block=[n, n]) for n in (128, 64, 32, 16)]
    return *(f"{r['tflops']:.0f}" for r in rows), f"{rows[0]['dense_tflops']:.0f}"


def attention_calls() -> tuple[str, ...]:
    kinds = ("attention, causal", "attention, window", "attention, mask", "attention, mask of 64-blocks")
    return tuple(us(row("attention_host_cuda", what=kind)["seconds"]) for kind in kinds)


def dense_causal() -> tuple[str, ...]:
    seconds = next(r["seconds"] for r in results("attention_long_cuda") if isinstance(r["seconds"], dict))
    return tuple(f"{seconds[name] * 1e3:.1f}" for name in ("ours", "cuDNN"))


def attention_rate(mask: str) -> tuple[str]:
    """TFLOP/s of attention with 16 heads of 128 and 16,384 tokens, by its mask."""
    return (f"{row('attention_table_cuda', shape=[1, 16, 16384, 128], mask=mask, dtype='float16')['tflops']:.0f}",)


def decode_times() -> tuple[str, ...]:
    """Microseconds of a token that reads 128 blocks, and of one that reads all keys."""
    rows = [r for r in results("attention_decode_cuda") if (r["keys"], r["page"]) == (131072, None)]
    return tuple(f"{next(r['us'] for r in rows if r.get('blocks') == blocks):.1f}" for blocks in (128, None))


def density_fit() -> tuple[str, ...]:
    fit = next(r for r in results("attention_density_cuda") if "slope" in r)
    return f"{fit['slope']:.3f}", f"{fit['start_seconds'] * 1e6:.0f}"


def lowest_density() -> tuple[str, ...]:
    found = results("attention_density_cuda")[0]
    return f"{found['density']:.2f}", f"{found['ratio']:.2f}"


def power_law() -> tuple[str]:
    return (f"{next(r for r in results('gemm_patterns_cuda') if 'power-law' in r['what'])['relative']:.2f}",)


def small_blocks() -> tuple[str, ...]:
    vector = row("spmv_table_cuda", block=[3, 3], dtype="float64")
    many = row("spmv_columns_cuda", block=[3, 3], dtype="float64")
    peers = many["peers"]
    return ms(vector["seconds"]), *(
        f"{x * 1e3:.2f}" for x in (many["seconds"], peers["cuSPARSE BSR"], peers["cupyx csr"])
    )


def shares_of_dense() -> tuple[str, ...]:
    rows = (row("gemm_table_cuda", dtype="float16", block=[n, n], kernel=None) for n in (128, 64, 32, 16))
    return tuple(f"{r['ratio']:.2f}" for r in rows)


def portable_product() -> tuple[str, str]:
    found = row("gemm_table_cuda", kernel="GemmSm80")
    return f"{found['tflops']:.0f}", f"{found['ratio']:.2f}"


def portable_attention() -> tuple[str, str]:
    found = row("attention_table_cuda", kernel="AttentionSm80")
    return f"{found['tflops']:.0f}", f"{found['tflops'] / found['peers']['cF']:.2f}"


def one_iteration() -> tuple[str]:
    """Milliseconds of an iteration of conjugate gradients with a V-cycle: a cube, 249,744 unknowns."""
    found = next(r for r in results("elasticity_cuda") if r["unknowns"] == 249744)
    return (f"{found['seconds'] / found['iterations'] * 1e3:.2f}",)


def few_columns() -> tuple[str]:
    """The time with 128 columns over that with one, for blocks 64 x 64."""
    seconds = {r["columns"]: r["columns"] / r["tflops"] for r in results("gemm_columns_cuda") if r["block"] == 64}
    return (f"{seconds[128] / seconds[1]:.1f}",)


def narrow_gradients() -> tuple[str, ...]:
    """Rates of gradients with blocks of 64 keys over those with 128, in order and not, and up to which share."""
    cases = [row("attention_backward_cuda", case=f"{n}-blocks .2 16K")["rates"] for n in (64, 128)]
    shares = (cases[0][name] / cases[1][name] for name in ("bsrgemm", "bsrgemm, any order"))
    return *(f"{share:.2f}" for share in shares), f"{constants('_MANY_BLOCKS')[0]:.2f}"


def unordered_gradients() -> tuple[str, ...]:
    """How much faster gradients are without an order, in percent."""
    cases = ("full 16K", "causal 16K", "128-blocks .2 16K", "64-blocks .2 16K")
    rates = [row("attention_backward_cuda", case=case)["rates"] for case in cases]
    return tuple(f"{100 * (r['bsrgemm, any order'] / r['bsrgemm'] - 1):.0f}" for r in rates)


@cache
def compiled_ahead() -> tuple[str, ...]:
    """Kernels that `compile` makes for Hopper, the seconds of one core that it expects, and kernels of `--all`."""
    from bsrgemm._cli.compile import common_specs, estimate, specs
    from bsrgemm.dtypes import DEVICE_DTYPES

    dtypes, common = [str(dtype) for dtype in DEVICE_DTYPES], common_specs("sm_90a")
    every = {*common_specs("sm_90a", dtypes), *specs(dtypes, every=True, arch="sm_90a")}
    seconds = estimate([("sm_90a", spec) for spec in common], threads=1)
    return f"{len(common)}", f"{round(seconds, -1):.0f}", f"{round(len(every), -2):,}"


def default_block() -> tuple[int]:
    """The side of the blocks of a mask, unless another one is asked for."""
    import inspect

    import bsrgemm as bg

    return (inspect.signature(bg.BlockMask.causal).parameters["block"].default,)


def tensor_columns() -> tuple[Any, ...]:
    least, large = constants("_TENSOR_COLUMNS", "_LARGE")
    return least, power(large)


def decode_on_a_gpu() -> tuple[Any, ...]:
    from bsrgemm.dtypes import HALF_DTYPES

    (dims,) = constants("HEAD_DIMS")
    return *HALF_DTYPES, *dims


def attention_dtypes() -> tuple[Any, ...]:
    """The dtypes that attention accepts, asked by calling it."""
    import numpy as np

    import bsrgemm as bg
    from bsrgemm.dtypes import HOST_DTYPES

    def accepted(dtype: Any) -> bool:
        x = np.zeros((1, 1, 1, 8), dtype)
        try:
            bg.attention(x, x, x)
        except (TypeError, ValueError):
            return False
        return True

    return tuple(dtype for dtype in HOST_DTYPES if accepted(dtype))


def products_over_ranks() -> tuple[Any, ...]:
    """The largest difference of a product over ranks from that of one process; the page says that bits repeat."""
    found = [r for r in results("scale_mpi_cpu") if r["what"] == "product" and r["ranks"] > 1]
    assert {r["ranks"] for r in found} == {2, 4} and all(r["repeats"] for r in found)
    return (f"{max(r['error'] for r in found):.0e}",)


def above_the_panel() -> tuple[Any, ...]:
    """Microseconds that a small product over two ranks takes above its panel alone, and what was wanted at most."""
    found = row("scale_mpi_cpu", what="above")
    return us(found["seconds"]), f"{found['most'] * 1e6:.0f}"


#: The schedulers of Dask that take least and most time for a task.
_SCHEDULERS = ("synchronous", "distributed")

SENTENCES: list[Fact] = [
    Fact("README.md", "need Linux, CuPy {} and compute capability {} or newer", lambda: (cupy_version(), capability())),
    Fact("README.md", "with Python {} or newer", python_version),
    Fact("README.md", "{} GPU tests passed and {} failed in the last whole run", gpu_suite),
    Fact("CONTRIBUTING.md", "every allocation of {} calls fails once", out_of_memory),
    Fact("docs/getting-started.md", "Python {} or newer", python_version),
    Fact(
        "docs/getting-started.md", "needs Linux, CuPy {} and compute capability {} or newer",
        lambda: (cupy_version(), capability()),
    ),
    Fact("docs/getting-started.md", "this took {} to {} ms for a million blocks", work_lists),
    Fact("docs/getting-started.md", "common sizes: {} kernels for sm_90a", lambda: compiled_ahead()[:1]),
    Fact("docs/getting-started.md", "take about {} seconds of one core", lambda: compiled_ahead()[1:2]),
    Fact("docs/getting-started.md", "about {} kernels for sm_90a, which takes hours", lambda: compiled_ahead()[2:]),
    Fact("docs/limits.md", "today the command makes {} of them", lambda: compiled_ahead()[:1]),
    Fact(
        "docs/limits.md",
        "at {} of the rate of blocks of 128 ({} with `deterministic=False`), if at most {} of the blocks",
        narrow_gradients,
    ),
    Fact(
        "docs/gradients.md",
        "the rate by {} % (full attention), {} % (causal), {} % (random blocks of 128 keys) and {} % (of 64 keys)",
        unordered_gradients,
    ),
    Fact(
        "docs/limits.md", "the result has at most {} block columns",
        lambda: (f"{constants('_MOST_COLUMNS', '_MOST_ROOM')[0]:,}",),
    ),
    Fact("docs/kernels/gemm_sm90.md", "float16: {} / {} / {} / {} of dense cuBLAS for blocks of 128", shares_of_dense),
    Fact("docs/kernels/gemm_sm80.md", "float16, blocks of 128: {} TFLOP/s, {} of cuBLAS", portable_product),
    Fact("docs/kernels/attention_sm80.md", "on an H200: {} TFLOP/s full, {} of cuDNN", portable_attention),
    Fact("docs/several-machines.md", "An iteration of conjugate gradients with a V-cycle takes {} ms", one_iteration),
    Fact("docs/block-size.md", "128 columns take {} times as long as one", few_columns),
    Fact("docs/linear-systems.md", "GMRES keeps {} vectors", lambda: constants("_BASIS")),
    Fact(
        "docs/several-machines.md", "an exchange between two ranks took {} us",
        lambda: (us(row("scale_mpi_cpu", what="product", timed=True, ranks=2)["exchange"]),),
    ),
    Fact("docs/several-machines.md", "by at most {} of its largest number", products_over_ranks),
    Fact("docs/several-machines.md", "it takes {} us above its panel alone, where at most {} us", above_the_panel),
    Fact(
        "docs/several-machines.md", "a task takes {} to {} ms",
        lambda: tuple(f"{row('dask_cpu', what='task', scheduler=name)['each'] * 1e3:.2f}" for name in _SCHEDULERS),
    ),
    Fact("docs/several-machines.md", "at most {} rows for each rank", lambda: (f"{constants('GATHERED_ROWS')[0]:,}",)),
    Fact("docs/how-do-i.md", "takes {} to {} microseconds of the host", host_of_all_calls),
    Fact("docs/how-do-i.md", "and {} at most", lambda: constants("_SHARED", "_MOST_THREADS")[1:]),
    Fact("docs/masks.md", "the default block is {}", default_block),
    Fact("docs/block-size.md", "They also need {} columns of B, or 2 if A has {} stored elements", tensor_columns),
    Fact(
        "docs/block-size.md", "for one vector, and for 2 to {} columns",
        lambda: constants("_MOST_SMALL", "_FEW_COLUMNS")[1:],
    ),
    Fact(
        "docs/limits.md", "needs Linux, CuPy {} or newer, NVRTC {} or newer, and compute capability {} or newer",
        lambda: (cupy_version(), ".".join(map(str, constants("OLDEST_NVRTC")[0])), capability()),
    ),
    Fact(
        "docs/limits.md", "whole run on a card was with Python {}, NumPy {} and SciPy {}",
        lambda: tuple(record()[name] for name in ("python", "numpy", "scipy")),
    ),
    Fact("docs/limits.md", "blocks are multiples of {}, up to {}", bounds_of_blocks),
    Fact("docs/limits.md", "A page has a power of two of tokens, from {} to {}", bounds_of_pages),
    Fact("docs/limits.md", "has 1 to {} queries in a call", most_queries),
    Fact("docs/limits.md", "has fewer than {} tokens; all heads and sequences together fewer than {}", most_tokens),
    Fact("docs/limits.md", "very many products (more than {} on an H200", products_of_a_row),
    Fact("docs/limits.md", "On the GPU: {} and {}, head dims {}, {}, {}, {}, {} and {}", decode_on_a_gpu),
    Fact("docs/limits.md", "q, k and v have one dtype: {}, {}, {}, {}, or fp8", attention_dtypes),
    Fact("docs/numerics.md", "the largest is {} and the smallest {}", fp8),
    Fact("docs/numerics.md", "changes a number by at most {} of it", fp8_rounding),
    Fact("docs/numerics.md", "round the weights to fp8, each by at most {}", fp8_rounding),
    Fact("docs/numerics.md", "within {} units of tf32's last place", tf32_rounding),
    Fact("docs/benchmarks.md", "CUDA events time {} to {} calls, as many as fit into {} s", timings),
    Fact("docs/benchmarks.md", "by reading {} MiB", flushed),
    Fact("docs/benchmarks.md", "idles {} s before each timing", lambda: constants("IDLE")),
    Fact("docs/benchmarks.md", "{} queries at the start", lambda: constants("_CHECKED")),
    Fact("docs/benchmarks.md", "and at least {} %", lambda: (percent(constants("_LEAST_NOISE")[0]),)),
    Fact("docs/benchmarks.md", "busiest unit if it is at {} % of its peak", lambda: constants("_BUSY")),
    Fact(
        "docs/benchmarks.md", "one group: {}, {}, {} or {}",
        lambda: constants("GROUPS")[0],
    ),
    Fact("docs/masks.md", "{} us of the host with `causal=True`, {} us with `window`", lambda: attention_calls()[:2]),
    Fact("docs/masks.md", "{} us with a mask, and {} us with a mask of 64-blocks", lambda: attention_calls()[2:]),
    Fact("docs/masks.md", "took {} ms, with cuDNN {} ms", dense_causal),
    Fact("docs/masks.md", "is {} x density x the time of dense attention, plus {} us", density_fit),
    Fact("docs/masks.md", "at {} it is {} times what the density says", lowest_density),
    Fact("docs/masks.md", "{} TFLOP/s with blocks of 128", lambda: attention_rate("26 of 128 blocks 128 per head")),
    Fact("docs/masks.md", "{} with blocks of 64. Attention", lambda: attention_rate("51 of 256 blocks 64")),
    Fact("docs/masks.md", "Attention without a mask runs at {} there", lambda: attention_rate("full")),
    Fact("docs/masks.md", "blocks of 64 took {} us, and {} us for all of them", decode_times),
    Fact("docs/masks.md", "sides are multiples of {} up to {}", bounds_of_blocks),
    Fact("docs/block-size.md", "128: {}, 64: {}, 32: {}, 16: {}", lambda: square_rates()[:4]),
    Fact("docs/block-size.md", "dense cuBLAS: {}", lambda: square_rates()[4:]),
    Fact("docs/block-size.md", "dense cuBLAS reaches {}", lambda: square_rates()[4:]),
    Fact("docs/block-size.md", "from 1024 columns on ({} of {} TFLOP/s)", rates_by_columns),
    Fact("docs/block-size.md", "the rate is {} against {} of dense: {} of dense's time", lambda: small_problem()[:3]),
    Fact("docs/block-size.md", "where n = 8192 takes {}", lambda: small_problem()[3:]),
    Fact("docs/block-size.md", "costs {} to {} us of the host", host_range),
    Fact("docs/block-size.md", "less than {} times against 64", lambda: (first_ratio(128, 64),)),
    Fact("docs/block-size.md", "less than {} times against 32", lambda: (first_ratio(64, 32),)),
    Fact("docs/block-size.md", "less than {} times against 16", lambda: (first_ratio(32, 16),)),
    Fact("docs/block-size.md", "a power-law pattern keeps {} of the rate", power_law),
    Fact("docs/block-size.md", "takes {} ms by a vector", lambda: small_blocks()[:1]),
    Fact("docs/block-size.md", "{} ms by 16 columns", lambda: small_blocks()[1:2]),
    Fact("docs/block-size.md", "where cuSPARSE takes {} ms and cupyx's CSR {} ms", lambda: small_blocks()[2:]),
    Fact(
        "docs/dask.md", "of such a panel takes {} us",
        lambda: (f"{row('dask_cpu', scheduler='none')['seconds'] * 1e6:.0f}",),
    ),
]  # fmt: skip


# ---------------------------------------------------------------------------------------------- pages
def with_tables(text: str) -> str:
    """The text of a page with every table made anew; an unknown name is a KeyError."""

    def made(found: re.Match[str]) -> str:
        name = found["name"]
        return f"<!-- facts:{name} -->\n\n{TABLES[name]()}\n\n<!-- /facts:{name} -->"

    return re.sub(r"<!-- facts:(?P<name>[\w-]+) -->.*?<!-- /facts:(?P=name) -->", made, text, flags=re.DOTALL)


def with_values(text: str, facts: Iterable[Fact]) -> str:
    """The text of a page with the values of its sentences; ValueError if one is not there exactly once."""
    for fact in facts:
        found = list(fact.pattern.finditer(text))
        if len(found) != 1:
            raise ValueError(f"{fact.page}: {len(found)} times there: {fact.words}")
        values = [str(value) for value in fact.values()]
        for group in range(len(values), 0, -1):
            first, last = found[0].span(group)
            text = text[:first] + values[group - 1] + text[last:]
    return text


def corrected(page: Path) -> str:
    """The text that a page should have."""
    name = page.relative_to(ROOT).as_posix()
    return with_values(with_tables(page.read_text(encoding="utf-8")), [fact for fact in SENTENCES if fact.page == name])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page differs")
    check = parser.parse_args(argv).check
    status = 0
    for page in PAGES:
        new = corrected(page)
        if new != page.read_text(encoding="utf-8"):
            status = int(check)
            print(f"{'differs' if check else 'written'}: {page.relative_to(ROOT)}")
            if not check:
                page.write_text(new, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
