"""``python -m bsrgemm profile``: the command line of ncu, what is read from its output, and every way it can fail.

No GPU and no ncu: a script in its place prints what ncu prints.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import _environment
from bsrgemm._benchmark import place
from bsrgemm._benchmark.cases.attentions import Attention, Decode
from bsrgemm._benchmark.cases.problem import Problem
from bsrgemm._benchmark.cases.products import Product
from bsrgemm._benchmark.show import ncu
from bsrgemm._cli import profile as profile_command
from bsrgemm._cli.profile import CASES, KERNELS

ROOT = Path(__file__).resolve().parents[2]
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
#: Columns of ``ncu --csv --page raw``: name, unit, values of two launches. StreamOrdered up, in ncu's form.
COLUMNS = [
    ("ID", "", "0", "1"),
    ("Process ID", "", "4711", "4711"),
    ("Process Name", "", "python3.11", "python3.11"),
    ("Host Name", "", "127.0.0.1", "127.0.0.1"),
    ("Kernel Name", "", "attention_values", "gemm_sm90(Problem)"),
    ("Context", "", "1", "1"),
    ("Stream", "", "7", "7"),
    ("Block Size", "", "(256, 1, 1)", "(384, 1, 1)"),
    ("Grid Size", "", "(64, 1, 1)", "(132, 1, 1)"),
    ("Device", "", "0", "0"),
    ("CC", "", "9.0", "9.0"),
    ("dram__bytes.sum.per_second", "byte/s", "812,000,000", "1,250,000,000,000"),
    ("gpc__cycles_elapsed.avg.per_second", "hz", "1,590,000,000", "1,590,000,000"),
    ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", "%", "1.50", "26.04"),
    ("gpu__time_duration.sum", "ns", "4,160", "1,234,560"),
    ("launch__occupancy_limit_registers", "block", "8", "1"),
    ("launch__occupancy_limit_shared_mem", "block", "14", "2"),
    ("launch__registers_per_thread", "register/thread", "32", "168"),
    ("launch__func_cache_config", "", "CachePreferNone", "CachePreferNone"),
    ("launch__shared_mem_per_block_dynamic", "byte/block", "0", "205,824"),
    ("launch__shared_mem_per_block_static", "Kbyte/block", "4.096", "0"),
    ("lts__t_sector_hit_rate.pct", "%", "12.25", "86.40"),
    ("lts__throughput.avg.pct_of_peak_sustained_elapsed", "%", "3.10", "83.20"),
    ("sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_elapsed", "%", "0", "99.00"),
    ("sm__maximum_warps_per_active_cycle_pct", "%", "100", "18.75"),
    ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", "%", "0", "63.50"),
    ("sm__pipe_tensor_op_dmma_cycles_active.avg.pct_of_peak_sustained_elapsed", "%", "(!) n/a", "0"),
    ("sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active", "%", "0", "70.00"),
    ("sm__throughput.avg.pct_of_peak_sustained_elapsed", "%", "7.00", "64.10"),
    ("sm__warps_active.avg.pct_of_peak_sustained_active", "%", "40.00", "18.10"),
    (STALL.format("barrier"), "inst", "n/a", "1.00"),
    (STALL.format("gmma"), "inst", "", "5.00"),
    (STALL.format("long_scoreboard"), "inst", "9.00", "2.00"),
    (STALL.format("membar"), "inst", "(!) nan", "0.25"),
    (STALL.format("selected"), "inst", "1.00", "1.00"),
    (STALL.format("sleeping"), "inst", "0", "0"),
    (STALL.format("wait"), "inst", "0", "0.75"),
]


def _csv(*launches: int, columns: list[tuple[str, str, str, str]] = COLUMNS) -> str:
    rows = [[column[k] for column in columns] for k in (0, 1, *(2 + launch for launch in launches))]
    return "".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in rows)


NOISE = """==PROF== Connected to process 4711 (/usr/bin/python3.11)
compiled "gemm_sm90" in 2.5 s
"a line of the program that looks like CSV",1
"a quote that is left open
==PROF== Profiling "attention_values" - 0: 0%....50%....100% - 18 passes
==PROF== Profiling "gemm_sm90" - 1: 0%....50%....100% - 18 passes
==PROF== Disconnected from process 4711
==WARNING== Unable to access the following metrics: ctc__rx_bytes_data_user.sum.
"""
OUTPUT = NOISE + _csv(0, 1)


@pytest.fixture(autouse=True)
def _no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with 8 GB free, as far as the command looks."""
    pytest.importorskip("cupy")
    monkeypatch.setattr(profile_command, "cuda_problem", lambda: None)
    monkeypatch.setattr(place.Gpu, "free_bytes", lambda self: 8_000_000_000)


def _program(folder: Path, body: str) -> Path:
    path = folder / "ncu"
    path.write_text(f"#!{sys.executable}\nimport os, sys, time\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts an ``ncu`` on PATH that keeps its arguments, prints and exits."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def put(output: str = OUTPUT, status: int = 0, errors: str = "") -> Path:
        seen = folder / "arguments"
        _program(
            folder,
            f"open({str(seen)!r}, 'w').write('\\n'.join(sys.argv[1:]))\n"
            f"sys.stdout.write({output!r}); sys.stderr.write({errors!r}); sys.exit({status})",
        )
        return seen

    return put


def main(*argv: str) -> int:
    parser = argparse.ArgumentParser(prog="bsrgemm")
    profile_command.add_command(parser.add_subparsers(required=True))
    args = parser.parse_args(argv)
    status: int = args.command(args)
    return status


def _refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What the command says when it ends with status 2."""
    with pytest.raises(SystemExit) as stop:
        main(*argv)
    assert stop.value.code == 2
    return capsys.readouterr().err.partition(": error: ")[2]


# ---------------------------------------------------------------------------------------- cases
def _problem(*argv: str) -> Problem:
    """What the command makes of a command line."""
    parser = argparse.ArgumentParser()
    profile_command.add_command(parser.add_subparsers())
    args = parser.parse_args(["profile", *argv])
    options = profile_command.options_of(args.case, {option: getattr(args, option) for option in CASES[args.case]})
    return profile_command.problem_of(args.case, options)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("gemm", Product("gemm", 8192, (64, 64), 0.22, 8192)),
        ("gemm --size 512 --block 32 --columns 1", Product("gemm", 512, (32, 32), 0.22, 1)),
        ("gemm --dtype tf32", Product("gemm", 8192, (64, 64), 0.22, 8192, "float32", "tf32")),
        ("spmv", Product("spmv", 65536, (16, 16), 0.01, 1, "float32")),
        ("attention", Attention(1, 16, 16384, 128)),
        ("attention --causal --dtype e4m3", Attention(1, 16, 16384, 128, causal=True, dtype="e4m3")),
        ("attention --density 0.2 --heads 2", Attention(1, 2, 16384, 128, blocks=(128, 26))),
        ("attention --density 0.01 --size 256", Attention(1, 16, 256, 128, blocks=(128, 1))),
        ("attention --window 9 --head-dim 64", Attention(1, 16, 16384, 64, window=9)),
        ("decode", Decode(1, 131072)),
        ("decode --heads 3 --page 64", Decode(1, 131072, 3, 3, page=64)),
    ],
)
def test_a_case_is_a_problem_of_bench(line: str, problem: Problem) -> None:
    assert _problem(*line.split()) == problem


@pytest.mark.parametrize("case", CASES)
def test_the_child_is_asked_for_the_same_problem(case: str) -> None:
    asked: dict[str, Any] = {
        "size": 512, "dtype": "bfloat16", "block": 32, "density": 1 / 3, "heads": 8, "head_dim": 64, "causal": True,
        "window": 100, "columns": 40, "page": 16,
    }  # fmt: skip
    if case == "attention":  # blocks do not go with a window
        asked["density"] = 1.0
    options = profile_command.options_of(case, {option: asked[option] for option in CASES[case]})
    assert _problem(*profile_command.arguments(case, options)) == profile_command.problem_of(case, options)


@pytest.mark.parametrize(
    ("line", "shape"),
    [
        ("gemm --size 64 --block 16 --density 0.5 --columns 24", (64, 24)),
        ("gemm --size 64 --block 16 --density 0.5 --columns 24 --dtype e4m3", (64, 24)),
        ("gemm --size 64 --block 16 --density 0.5 --columns 24 --dtype tf32", (64, 24)),
        ("gemm --size 48 --block 3 --density 0.01 --columns 1 --dtype bfloat16", (48,)),
        ("spmv --size 60 --block 4 --density 0.3 --dtype float64", (60,)),
        ("attention --size 70 --heads 2 --head-dim 16 --dtype float32", (1, 2, 70, 16)),
        ("attention --size 70 --heads 2 --head-dim 16 --dtype e4m3 --causal", (1, 2, 70, 16)),
        ("attention --size 128 --heads 2 --head-dim 16 --causal --window 9", (1, 2, 128, 16)),
        ("attention --size 128 --heads 2 --head-dim 16 --block 32 --density 0.5", (1, 2, 128, 16)),
        ("decode --size 50 --heads 8 --head-dim 64", (1, 8, 1, 64)),
        ("decode --size 50 --heads 3 --head-dim 64 --page 16 --dtype bfloat16", (1, 3, 1, 64)),
    ],
)
def test_inside_ncu_one_warm_call_is_looked_at(
    line: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = pytest.importorskip("cupyx.profiler")
    seen: list[Any] = []

    @contextlib.contextmanager
    def profile() -> Iterator[None]:
        seen.append("start")
        yield
        seen.append("stop")

    def ready(self: Any, *args: Any) -> Any:
        made = real(self, *args)
        call = made.call
        made.call = lambda: seen.append(call())
        return made

    kind = type(_problem(*line.split()))
    real = kind.ready
    monkeypatch.setattr(kind, "ready", ready)
    monkeypatch.setattr(profiler, "profile", profile)
    monkeypatch.setattr(place, "place_of", lambda device: place.Cpu())
    assert main("profile", *line.split(), "--inside") == 0
    *warm, start, result, stop = seen
    assert len(warm) == 3 and (start, stop) == ("start", "stop")
    values = np.asarray(result).astype(np.float64)
    assert values.shape == shape and np.isfinite(values).all()
    assert (values != 0).mean() > 0.5  # queries of which the mask and the window leave nothing get 0


def test_pages_are_those_that_the_cache_takes() -> None:
    def takes(page: int) -> bool:
        with contextlib.suppress(ValueError):
            return bg.KVCache(1, 1, 1, 1, page=page, device="cpu").page == page
        return False

    assert tuple(filter(takes, range(1, 1025))) == profile_command._PAGES


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gemv"], "'gemv'"),
        (["gemm", "--heads", "4"], "--heads: gemm only has --size, --block, --density"),
        (["decode", "--causal"], "--causal: decode only has"),
        (["decode", "--window", "9"], "--window: decode only has --size, --heads, --head-dim, --dtype, --page"),
        (["attention", "--page", "64"], "--page: attention only has"),
        (["decode", "--page", "24"], "24"),
        (["spmv", "--size", "0"], "--size: wanted a number from 1 on, got 0"),
        (["gemm", "--size", "100", "--block", "64"], "--size: wanted a multiple of the block, 64, got 100"),
        (["gemm", "--density", "1.5"], "--density"),
        (["gemm", "--density", "nan"], "--density"),
        (["attention", "--density", "0.5", "--causal"], "a mask of blocks is not also causal or a window here"),
        (["attention", "--density", "0.5", "--size", "100"], "a length of 100 is not a multiple of the block 128"),
        (["decode", "--dtype", "float32"], "--dtype: decode does not take float32"),
        (["attention", "--dtype", "tf32"], "--dtype: attention does not take tf32"),
        (["spmv", "--dtype", "tf32"], "--dtype: spmv does not take tf32"),
        (["spmv", "--size", "100"], "--size: wanted a multiple of the block, 16, got 100"),
        (["gemm", "--dtype", "int8"], "'int8'"),
    ],
)
def test_what_cannot_be_profiled_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in _refused(capsys, "profile", *arguments)


# -------------------------------------------------------------------------------------- command
def test_a_dry_run_prints_the_command_of_ncu_and_needs_neither_ncu_nor_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main("profile", "attention", "--causal", "--dry-run", "--keep", "a report", "--ncu", "/opt/ncu") == 0
    line = capsys.readouterr().out
    assert line.startswith("/opt/ncu ") and "--profile-from-start off" in line and "--csv --page raw" in line
    assert "--kernel-name 'regex:^attention_s'" in line
    assert "--export 'a report' --force-overwrite" in line
    assert all(metric in line for metric, _ in ncu.METRICS.values())
    assert line.rstrip().endswith("--causal --block 128 --density 1.0 --inside")


@pytest.mark.parametrize("case", CASES)
def test_a_dry_run_allocates_nothing(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main("profile", case, "--size", str(2**50), "--dry-run") == 0
    assert f"-m bsrgemm profile {case} --size {2**50} " in capsys.readouterr().out


def test_other_commands_do_not_wait_for_the_problems() -> None:
    body = "import sys, bsrgemm.__main__; print(*(m for m in sys.modules if m.startswith('bsrgemm._benchmark')))"
    done = subprocess.run([sys.executable, "-c", body], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_metrics_are_asked_for_with_a_suffix() -> None:
    """Without one, ncu takes the name for a pattern and fails where nothing matches."""
    assert all("." in metric for metric, _ in ncu.METRICS.values())


def test_every_kernel_of_a_case_is_looked_at_and_no_other() -> None:
    names = [path.stem for path in (ROOT / "cuda").glob("*.cu")]
    looked_at = {case: sorted(n for n in names if re.search(KERNELS[case], n)) for case in CASES}
    assert looked_at == {
        "gemm": [
            *("gemm_few", "gemm_simt", "gemm_sm80", "gemm_sm90", "gemm_turned_sm90"),
            *("spmm", "spmm_f64", "spmv", "spmv_small"),
        ],
        "spmv": ["spmv", "spmv_small"],
        "attention": ["attention_short_sm90", "attention_simt", "attention_sm80", "attention_sm90"],
        "decode": ["decode"],
    }


# -------------------------------------------------------------------------------------- parsing
def test_launches_are_found_among_other_lines_longest_first() -> None:
    gemm, values = ncu.parse(OUTPUT)
    assert (gemm.kernel, values.kernel) == ("gemm_sm90", "attention_values")
    assert gemm.where == {"Grid Size": "(132, 1, 1)", "Block Size": "(384, 1, 1)", "CC": "9.0"}
    assert gemm.seconds == pytest.approx(1.23456e-3)
    assert gemm.metrics["launch__shared_mem_per_block_dynamic"] == 205_824
    assert values.metrics["launch__shared_mem_per_block_static"] == 4096
    assert not {"ID", "Host Name", "CC"} & set(gemm.metrics)


def test_what_is_no_number_is_none() -> None:
    (values,) = ncu.parse(_csv(0))
    nothing = [name for name, value in values.metrics.items() if value is None]
    assert nothing == [
        "launch__func_cache_config",
        "sm__pipe_tensor_op_dmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
        *(STALL.format(reason) for reason in ("barrier", "gmma", "membar")),
    ]


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("4,160", "nsecond", 4.16e-6),
        ("1.5", "ms", 1.5e-3),
        ("2", "s", 2.0),
        ("3.35", "Tbyte/second", 3.35e12),
        ("1.59", "cycle/nsecond", 1.59e9),
        ("1.59", "Ghz", 1.59e9),
        ("168", "register/thread", 168.0),
        ("0.25", "inst", 0.25),
        ("12", "", 12.0),
        ("inf", "", None),
    ],
)
def test_numbers_lose_the_prefix_of_their_unit(text: str, unit: str, value: float | None) -> None:
    assert ncu.number(text, unit) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize("output", ["", NOISE, '"ID","Kernel Name"\n', '""\n', '"ID"\n"0"\n'])
def test_output_without_a_launch_has_none(output: str) -> None:
    assert ncu.parse(output) == []


def test_a_row_that_was_cut_off_is_left_out() -> None:
    whole = _csv(1, 0)
    assert [launch.kernel for launch in ncu.parse(whole[: len(whole) - 40])] == ["gemm_sm90"]


# -------------------------------------------------------------------------------------- figures
def test_figures_come_from_the_metrics() -> None:
    f = ncu.figures(ncu.parse(OUTPUT)[0].metrics)
    stalls = f.pop("stalls")
    assert f == pytest.approx(
        {
            "duration_us": 1234.56, "clock_ghz": 1.59, "sm_pct": 64.1, "l2_hit_pct": 86.4, "l2_pct": 83.2,
            "dram_pct": 26.04, "dram_gbs": 1250.0, "occupancy_pct": 18.1, "most_occupancy_pct": 18.75,
            "registers": 168, "blocks_by_registers": 1, "blocks_by_shared": 2, "shared_kib": 201.0,
            "tensor_pct": 63.5,
        }
    )  # fmt: skip
    assert stalls == pytest.approx({"gmma": 50.0, "long_scoreboard": 20.0, "barrier": 10.0, "wait": 7.5, "membar": 2.5})
    assert list(stalls) == ["gmma", "long_scoreboard", "barrier", "wait", "membar"]


@pytest.mark.parametrize(
    ("metrics", "tensor"),
    [
        ({"sm__pipe_tensor_cycles_active_v2.avg.pct_of_peak_sustained_elapsed": 30.0}, 30.0),  # sm_89
        (
            {
                "sm__pipe_tensor_subpipe_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed": 41.0,  # sm_100, sm_120
                "sm__pipe_tensor_subpipe_imma_cycles_active.avg.pct_of_peak_sustained_elapsed": 2.0,
                "sm__inst_executed_pipe_tensor_subpipe_hmma.avg.pct_of_peak_sustained_elapsed": 90.0,
            },
            41.0,
        ),
        ({"sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active": 12.0}, 12.0),
        ({"sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": 7.0}, 7.0),
        ({"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": None}, None),
        ({"sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed": 50.0}, None),
    ],
)
def test_the_tensor_pipe_goes_by_many_names(metrics: dict[str, float | None], tensor: float | None) -> None:
    assert ncu.figures(metrics)["tensor_pct"] == tensor


def test_every_figure_has_a_value_and_a_reading() -> None:
    rows = ncu.readings(ncu.figures(ncu.parse(OUTPUT)[0].metrics))
    assert len(rows) == 10 and all(all(row) for row in rows)
    table = {name: (value, reading) for name, value, reading in rows}
    assert table["duration"] == ("1,234.6 us", "caches flushed, clock set by ncu at 1.59 GHz: no benchmark")
    assert table["tensor pipe"] == ("63.5 %", "tensor cores are busy")
    assert table["L2 throughput"] == ("83.2 %", "the limit, or close to it")
    assert table["DRAM throughput"] == ("26.0 %, 1,250 GB/s", "DRAM has bandwidth to spare")
    assert table["occupancy"] == ("18.1 % of 18.8 %", "as many warps as fit")
    assert table["registers"] == ("168 a thread", "blocks that fit an SM: 1, the tighter limit")
    assert table["shared memory"] == ("201.0 KiB a block", "blocks that fit an SM: 2")
    assert table["stalls"][0] == "gmma 50 %, long_scoreboard 20 %, barrier 10 %, wait 8 %"
    assert table["stalls"][1] == "a warp waits for products of its warp group (wgmma)"


def test_figures_that_are_not_known_are_dashes() -> None:
    found = ncu.figures({})
    rows = ncu.readings(found)
    assert [value for _, value, _ in rows] == ["-"] * 10
    assert ncu.limit(found).startswith("unknown")


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ({"tensor_pct": 85.0, "sm_pct": 85.2}, "the tensor cores: 85 % of the peak"),
        ({"tensor_pct": 0.0, "sm_pct": 75.0, "dram_pct": 30.0}, "the SM's pipes: 75 % of the peak"),
        ({"dram_pct": 91.0, "l2_pct": 40.0, "sm_pct": None}, "DRAM: 91 % of the peak"),
        ({"l2_pct": 40.0}, "waiting for a memory fence: the busiest unit, the L2, reaches 40 % of its peak"),
    ],
)
def test_the_limit_is_the_busiest_unit_or_waiting(shares: dict[str, float | None], said: str) -> None:
    found = ncu.figures({STALL.format("membar"): 1.0})
    assert ncu.limit(found | shares) == said


def test_a_stall_without_words_is_named() -> None:
    rows = ncu.readings(ncu.figures({STALL.format("novelty"): 1.0}))
    assert rows[-1] == ("stalls", "novelty 100 %", "a warp waits for novelty")


# ------------------------------------------------------------------------------------- a whole run
@pytest.mark.usefixtures("card")
def test_a_run_prints_the_figures_of_the_longest_launch(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    seen = install()
    assert main("profile", "gemm", "--size", "1024", "--kernel", "gemm|values", "--keep", "report") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "gemm --size 1024 --block 64 --density 0.22 --columns 8192 --dtype float16: ncu runs it several times"
    )
    assert lines[1] == "gemm_sm90, Grid Size (132, 1, 1), Block Size (384, 1, 1), CC 9.0"
    assert [line.partition("  ")[0] for line in lines[2:-2]] == [
        "duration", "tensor pipe", "SM throughput", "L2 hit rate", "L2 throughput", "DRAM throughput", "occupancy",
        "registers", "shared memory", "stalls",
    ]  # fmt: skip
    assert lines[-2:] == ["limited by the L2: 83 % of the peak", "shorter: attention_values, 4.2 us"]
    arguments = seen.read_text().splitlines()
    assert "regex:gemm|values" in arguments and arguments[-1] == "--inside"
    assert arguments[arguments.index("--export") + 1] == "report"


@pytest.mark.usefixtures("card")
def test_on_a_terminal_the_table_is_one_of_rich(
    install: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("COLUMNS", "160"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    install()
    assert main("profile", "gemm") == 0
    text = capsys.readouterr().out
    assert "┃" in text and "1,234.6 us" in text and "limited by the L2" in text


@pytest.mark.usefixtures("card")
def test_without_rich_the_table_is_text(
    install: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("rich", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    install()
    assert main("profile", "gemm") == 0
    assert "L2 hit rate      86.4 %" in capsys.readouterr().out


@pytest.mark.usefixtures("card")
def test_json_holds_the_case_the_figures_and_every_metric(
    install: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install()
    assert main("profile", "spmv", "--size", "4096", "--json", str(tmp_path / "found.json")) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    options = "--size 4096 --block 16 --density 0.01 --dtype float32"
    assert found["command"] == f"python -m bsrgemm profile spmv {options}"
    problem = Product("spmv", 4096, (16, 16), 0.01, 1, "float32")
    assert found["case"] == {"group": "spmv", "name": str(problem)} | problem.parameters()
    assert found["kernel"] == "gemm_sm90" and found["launch"]["CC"] == "9.0"
    assert found["figures"]["tensor_pct"] == 63.5 and found["figures"]["stalls"]["gmma"] == 50.0
    assert found["readings"]["stalls"]["value"].startswith("gmma 50 %")
    assert found["limit"] == "the L2: 83 % of the peak"
    assert found["metrics"]["lts__t_sector_hit_rate.pct"] == 86.4
    assert found["metrics"]["launch__func_cache_config"] is None
    assert "127.0.0.1" not in json.dumps(found)


@pytest.mark.usefixtures("card")
def test_metrics_that_ncu_does_not_know_do_not_fail_the_run(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    missing = [column for column in COLUMNS if not column[0].startswith(("dram", "gpu__dram", "smsp", "sm__pipe"))]
    missing = [column for column in missing if "pipe_tensor" not in column[0]]
    install(NOISE + _csv(1, columns=missing) + "==ERROR== Some metrics could not be collected\n", status=1)
    assert main("profile", "gemm") == 0
    captured = capsys.readouterr()
    for name in ("tensor pipe", "DRAM throughput", "stalls"):
        (line,) = (line for line in captured.out.splitlines() if line.startswith(name))
        assert line.split() == [*name.split(), "-"]
    assert "ncu ended with status 1" in captured.err


# -------------------------------------------------------------------------------------- failures
def test_without_cupy_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    said = _refused(capsys, "profile", "gemm")
    assert "needs a GPU" in said and "CuPy" in said and "bsrgemm[cuda12]" in said


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cupy")

    def none(cupy: Any) -> None:
        raise RuntimeError("cudaErrorNoDevice")

    monkeypatch.setattr(_environment, "_device", none)
    said = _refused(capsys, "profile", "gemm")
    assert "needs a GPU; missing a CUDA device (cudaErrorNoDevice)" in said


@pytest.mark.usefixtures("card")
def test_without_ncu_it_says_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    said = _refused(capsys, "profile", "gemm")
    assert "no program 'ncu'" in said and "CUDA toolkit" in said and "--ncu PATH" in said
    assert "no program '/nowhere/ncu'" in _refused(capsys, "profile", "gemm", "--ncu", "/nowhere/ncu")


@pytest.mark.usefixtures("card")
def test_ncu_may_be_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = _program(tmp_path, f"sys.stdout.write({OUTPUT!r})")
    assert main("profile", "gemm", "--ncu", str(program)) == 0


@pytest.mark.usefixtures("card")
def test_an_ncu_that_cannot_be_started_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "ncu"
    program.write_bytes(b"\x7fELF\0")
    program.chmod(0o755)
    assert str(program) in _refused(capsys, "profile", "gemm", "--ncu", str(program))


@pytest.mark.usefixtures("card")
def test_operands_beyond_the_free_memory_are_refused_before_ncu_runs(
    install: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = install()
    said = _refused(capsys, "profile", "gemm", "--size", "131072", "--density", "1")
    problem = Product("gemm", 131072, (64, 64), 1.0, 8192)
    assert f"--size: {problem} needs about {problem.memory / 1e9:.1f} GB, 8.0 GB are free on the GPU" in said
    assert not seen.exists()


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("option", ["--json", "--keep"])
def test_a_folder_that_is_not_there_is_refused_before_ncu_runs(
    option: str, install: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = install()
    assert "there is no folder" in _refused(capsys, "profile", "gemm", option, str(tmp_path / "none" / "file"))
    assert not seen.exists()


@pytest.mark.usefixtures("card")
def test_missing_permission_is_explained_with_both_remedies(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "==PROF== Connected to process 4711\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access "
        "NVIDIA GPU Performance Counters on the target device 0.\n==WARNING== No kernels were profiled.\n"
    )
    install(text, status=1)
    said = _refused(capsys, "profile", "gemm")
    assert "ERR_NVGPUCTRPERM" in said and "root" in said and "NVreg_RestrictProfilingToAdminUsers=0" in said


@pytest.mark.usefixtures("card")
def test_no_kernel_that_matches_is_told(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "==PROF== Connected to process 1\n==PROF== Disconnected from process 1\n==WARNING== No kernels were profiled.\n"
    )
    install(text)
    assert "--kernel: no kernel of the call matches 'sgemm'" in _refused(capsys, "profile", "gemm", "--kernel", "sgemm")


@pytest.mark.usefixtures("card")
def test_a_child_that_crashes_is_shown_with_its_last_lines(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trace = "Traceback (most recent call last):\n" + "".join(f"  line {i}\n" for i in range(50))
    install(
        "==PROF== Connected to process 1\n==PROF== Disconnected from process 1\n"
        "==ERROR== The application returned an error code (1).\n==WARNING== No kernels were profiled.\n",
        status=1,
        errors=f"{trace}ValueError: block: wanted 16 to 256\n",
    )
    said = _refused(capsys, "profile", "attention")
    assert "the profiled process failed, and ncu ended with status 1" in said
    assert "ValueError: block: wanted 16 to 256" in said and "line 49" in said and "line 9\n" not in said
    assert "==PROF==" not in said


@pytest.mark.usefixtures("card")
def test_a_child_that_crashes_after_its_launch_is_a_failure_too(
    install: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    install("==ERROR== The application returned an error code (11).\n" + OUTPUT, status=11)
    assert "the profiled process failed" in _refused(capsys, "profile", "gemm")


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("status", [0, 1])
def test_an_error_of_ncu_itself_is_shown(status: int, install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install("==ERROR== Profiling failed because a driver resource was unavailable.\n", status=status)
    said = _refused(capsys, "profile", "gemm")
    assert f"ncu ended with status {status}" in said and "driver resource was unavailable" in said


def test_an_interrupt_stops_ncu(tmp_path: Path) -> None:
    started, ended = tmp_path / "started", tmp_path / "ended"
    program = _program(
        tmp_path,
        f"open({str(started)!r}, 'w').close()\n"
        "try:\n    time.sleep(60)\n"
        f"except KeyboardInterrupt:\n    open({str(ended)!r}, 'w').close()",
    )
    body = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from bsrgemm._cli import profile as profile_command\n"
        f"try: profile_command._run([{str(program)!r}])\n"
        "except KeyboardInterrupt: print('passed on')"
    )
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", body], cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    try:
        patience = time.monotonic() + 60
        while not started.exists() and time.monotonic() < patience:
            time.sleep(0.05)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert out == "passed on\n" and err == "interrupted: ncu is being stopped\n" and ended.exists()
