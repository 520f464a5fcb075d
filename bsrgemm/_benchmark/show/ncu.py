"""NVIDIA Nsight Compute without starting it: its command line, and what its output says.

``command_line`` asks for metrics, ``parse`` finds the launches in ``ncu --csv --page raw``, ``failure`` says why there
are none; ``figures`` picks from the metrics of a launch, ``readings`` and ``limit`` put the figures into words.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# ----------------------------------------------------------------------------------- command line
#: Figure: metric of ncu, factor. They are there since sm_75, the last two on cards with DRAM of their own. One that ncu
#: does not know is "n/a", since it has a suffix; without one it would be an error.
METRICS = {
    "duration_us": ("gpu__time_duration.sum", 1e6),
    "clock_ghz": ("gpc__cycles_elapsed.avg.per_second", 1e-9),
    "sm_pct": ("sm__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "l2_hit_pct": ("lts__t_sector_hit_rate.pct", 1.0),
    "l2_pct": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "dram_pct": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "dram_gbs": ("dram__bytes.sum.per_second", 1e-9),
}
#: ncu's own lists of what differs between cards: names of the tensor pipe, reasons of stalls; and the launch.
SECTIONS = ("ComputeWorkloadAnalysis", "WarpStateStats", "Occupancy", "LaunchStats")


def command_line(ncu: str, kernel: str, child: Sequence[str], keep: str | None = None) -> list[str]:
    """The command line to profile matching kernels of `child` between its cudaProfilerStart and cudaProfilerStop."""
    export = ["--export", keep, "--force-overwrite"] if keep else []
    return [
        *(ncu, "--target-processes", "all", "--profile-from-start", "off", "--kernel-name", f"regex:{kernel}"),
        *(x for section in SECTIONS for x in ("--section", section)),
        *("--metrics", ",".join(metric for metric, _ in METRICS.values()), "--apply-rules", "no"),
        *("--csv", "--page", "raw", *export, *child),
    ]


# ----------------------------------------------------------------------------------------- output
@dataclass(frozen=True)
class Launch:
    """A launch that ncu measured; metrics in seconds, bytes and Hz, None where ncu has no number."""

    kernel: str
    where: dict[str, str]
    metrics: dict[str, float | None]

    def __str__(self) -> str:
        return ", ".join([self.kernel, *(f"{name} {value}" for name, value in self.where.items())])

    @property
    def seconds(self) -> float:
        return self.metrics.get(METRICS["duration_us"][0]) or 0.0


_WHERE = ("Grid Size", "Block Size", "CC")


def parse(output: str) -> list[Launch]:
    """The launches in what ncu printed, longest first, whatever was printed around them."""
    lines = (line for line in output.splitlines() if line.startswith('"'))
    rows = [row for line in lines for row in csv.reader([line])]  # one by one: a quote left open ends with its line
    start = next((i for i, row in enumerate(rows) if row[0] == "ID" and "Kernel Name" in row), len(rows))
    header = rows[start] if start < len(rows) else []
    units, found = [""] * len(header), []
    for row in rows[start + 1 :]:
        if len(row) == len(header) and not row[0]:
            units = row
        elif len(row) == len(header):
            cells = dict(zip(header, row, strict=True))
            metrics = {name: number(x, unit) for name, x, unit in zip(header, row, units, strict=True) if "__" in name}
            where: dict[str, str] = {name: cells[name] for name in _WHERE if name in cells}
            found.append(Launch(cells["Kernel Name"].partition("(")[0], where, metrics))
    return sorted(found, key=lambda launch: -launch.seconds)


_UNIT = re.compile(r"([numKMGT]?)(?:second|s|byte|[hH]z)")
_FACTORS = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def number(text: str, unit: str = "") -> float | None:
    """A value of ncu without the prefix of its unit, None for "n/a" and the like.

    >>> number("1,234.50", "Kbyte/block"), number("2", "byte/us"), number("(!) n/a", "%")
    (1234500.0, 2000000.0, None)
    """
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    up, down = (_FACTORS[match[1]] if (match := _UNIT.fullmatch(x)) else 1.0 for x in f"{unit}/".split("/")[:2])
    return value * up / down if math.isfinite(value) else None


_LAST_LINES = 10
_NO_COUNTERS = """ncu may not read the GPU's counters (ERR_NVGPUCTRPERM). Either run this command as root (in a
container that was started with --cap-add=SYS_ADMIN), or let every user read them: put the line
  options nvidia NVreg_RestrictProfilingToAdminUsers=0
into a file of /etc/modprobe.d and reboot"""


def failure(status: int, output: str, kernel: str) -> str | None:
    """Why ncu has nothing to show; None if it has."""
    if "ERR_NVGPUCTRPERM" in output:
        return _NO_COUNTERS
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith(("==PROF==", '"'))]
    ended = f"ncu ended with status {status}; the last lines:\n  " + "\n  ".join(lines[-_LAST_LINES:])
    if "application returned an error code" in output:
        return f"the profiled process failed, and {ended}"
    if parse(output):
        return None
    if "==ERROR==" not in output and (status == 0 or "No kernels were profiled" in output):
        return f"--kernel: no kernel of the call matches {kernel!r}"
    return ended


# ---------------------------------------------------------------------------------------- figures
_OF_SECTIONS = {
    "occupancy_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1.0),
    "most_occupancy_pct": ("sm__maximum_warps_per_active_cycle_pct", 1.0),
    "registers": ("launch__registers_per_thread", 1.0),
    "blocks_by_registers": ("launch__occupancy_limit_registers", 1.0),
    "static_kib": ("launch__shared_mem_per_block_static", 1 / 1024),
    "dynamic_kib": ("launch__shared_mem_per_block_dynamic", 1 / 1024),
    "blocks_by_shared": ("launch__occupancy_limit_shared_mem", 1.0),
}
#: The tensor pipe: its busy cycles, or else its instructions; of all cycles, or else of those of busy SMs.
_TENSOR = [
    re.compile(rf"sm__{what}\.avg\.pct_of_peak_sustained_{of}")
    for what in (r"pipe_tensor\w*_cycles_active\w*", r"inst_executed_pipe_tensor\w*")
    for of in ("elapsed", "active")
]
_STALL = re.compile(r"smsp__average_warps?(?:_latency)?_issue_stalled_(\w+?)(?:_per_issue_active)?\.ratio")


def figures(metrics: dict[str, float | None]) -> dict[str, Any]:
    """The figures of a launch, None where they are not known; stalls in percent of a warp's time, longest first."""
    known = {name: value for name, value in metrics.items() if value is not None}
    found: dict[str, Any] = {
        name: known[metric] * factor if metric in known else None
        for name, (metric, factor) in (METRICS | _OF_SECTIONS).items()
    }
    static, dynamic = found.pop("static_kib"), found.pop("dynamic_kib")
    found["shared_kib"] = None if static is None and dynamic is None else (static or 0.0) + (dynamic or 0.0)
    pipes = ([value for name, value in known.items() if pattern.fullmatch(name)] for pattern in _TENSOR)
    found["tensor_pct"] = next((max(values) for values in pipes if values), None)
    matches = ((_STALL.fullmatch(name), value) for name, value in known.items())
    cycles = {match[1]: value for match, value in matches if match and not match[1].endswith("_not_issued")}
    whole = sum(cycles.values())  # "selected" is no wait, but part of a warp's time
    waits = sorted(cycles.items(), key=lambda item: -item[1])
    found["stalls"] = {name: 100 * value / whole for name, value in waits if value > 0 and name != "selected"}
    return found


# --------------------------------------------------------------------------------------- in words
#: ncu's rule of thumb: what reaches so many percent of its peak is the limit; if nothing does, waiting is.
_BUSY = 60
#: What a warp waits for.
STALLS = {
    "barrier": "the other warps of its block",
    "gmma": "products of its warp group (wgmma)",
    "lg_throttle": "room in the queue of loads and stores",
    "long_scoreboard": "global memory or the L2",
    "math_pipe_throttle": "a busy pipe: tensor cores or arithmetic",
    "membar": "a memory fence",
    "mio_throttle": "room in the queue to shared memory",
    "no_instruction": "instructions that are not in their cache",
    "not_selected": "its turn: there are warps enough",
    "short_scoreboard": "shared memory or special functions",
    "wait": "the fixed latency of its last instruction",
}


def _longest_wait(f: dict[str, Any]) -> str:
    reason = next(iter(f["stalls"]), "")
    return STALLS.get(reason, reason)


def limit(f: dict[str, Any]) -> str:
    """What limits the kernel, in one line."""
    # The SM's throughput is that of its busiest pipe: the tensor cores, if they are as busy.
    units = {"tensor_pct": "the tensor cores", "l2_pct": "the L2", "dram_pct": "DRAM", "sm_pct": "the SM's pipes"}
    shares = {name: round(f[name]) for name in units if f[name] is not None}
    if not shares:
        return "unknown: ncu has no figure of any unit"
    top = max(shares, key=lambda name: shares[name])
    if shares[top] >= _BUSY:
        return f"{units[top]}: {shares[top]} % of the peak"
    waits = f" for {_longest_wait(f)}" if f["stalls"] else ""
    return f"waiting{waits}: the busiest unit, {units[top]}, reaches {shares[top]} % of its peak"


_PERCENT = {
    "tensor pipe": "tensor_pct",
    "SM throughput": "sm_pct",
    "L2 hit rate": "l2_hit_pct",
    "L2 throughput": "l2_pct",
    "DRAM throughput": "dram_pct",
}
#: Figure: words for a value from so much on.
_WORDS: dict[str, tuple[tuple[float, str], ...]] = {
    "tensor_pct": ((80, "the limit, or close to it"), (_BUSY, "tensor cores are busy"),
                   (1, "tensor cores wait, for operands or for other work"), (0, "no tensor cores in use")),
    "sm_pct": ((80, "a pipe of the SM is the limit, or close to it"), (_BUSY, "the SM is busy"),
               (0, "the SM's pipes have time to spare")),
    "l2_hit_pct": ((80, "most reads end in the L2"), (50, "a good part of the reads goes on to DRAM"),
                   (0, "most reads go on to DRAM")),
    "l2_pct": ((80, "the limit, or close to it"), (_BUSY, "the L2 is busy"), (0, "the L2 has bandwidth to spare")),
    "dram_pct": ((80, "the limit, or close to it"), (_BUSY, "DRAM is busy"), (0, "DRAM has bandwidth to spare")),
    "filled_pct": ((80, "as many warps as fit"), (0, "fewer warps than fit: few blocks, or of uneven length")),
}  # fmt: skip
_MOST_STALLS = 4


def readings(f: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and meaning of each figure."""

    def text(name: str, form: str, unknown: str = "-") -> str:
        return unknown if f[name] is None else form.format(f[name])

    def words(name: str) -> str:
        return "" if f[name] is None else next((said for least, said in _WORDS[name] if f[name] >= least), "")

    def blocks(name: str, other: str) -> str:
        tighter = f[name] is not None and f[other] is not None and f[name] < f[other]
        return text(name, "blocks that fit an SM: {:.0f}", "") + (", the tighter limit" if tighter else "")

    known = f["occupancy_pct"] is not None and f["most_occupancy_pct"]
    f = {**f, "filled_pct": 100 * f["occupancy_pct"] / f["most_occupancy_pct"] if known else None}
    stalls = [f"{name} {part:.0f} %" for name, part in f["stalls"].items()][:_MOST_STALLS]
    more = {"dram_pct": text("dram_gbs", ", {:,.0f} GB/s", "")}
    clock = text("clock_ghz", " at {:.2f} GHz", "")
    occupancy = text("occupancy_pct", "{:.1f} %") + text("most_occupancy_pct", " of {:.1f} %", "")
    return [
        ("duration", text("duration_us", "{:,.1f} us"), f"caches flushed, clock set by ncu{clock}: no benchmark"),
        *((title, text(name, "{:.1f} %") + more.get(name, ""), words(name)) for title, name in _PERCENT.items()),
        ("occupancy", occupancy, words("filled_pct")),
        ("registers", text("registers", "{:.0f} a thread"), blocks("blocks_by_registers", "blocks_by_shared")),
        ("shared memory", text("shared_kib", "{:.1f} KiB a block"), blocks("blocks_by_shared", "blocks_by_registers")),
        ("stalls", ", ".join(stalls) or "-", f"a warp waits for {_longest_wait(f)}" if stalls else ""),
    ]
