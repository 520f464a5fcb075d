"""Run the GPU tests and write tests/record/gpu_record.json: ``python -m tests.record.run`` on a machine with a card.

First all tests marked `gpu`, then the tests marked `sanitizer` under the tools of compute-sanitizer, which is found on
PATH; last the same suite on the stand-in, which tells for which tests the launches cannot be compared
without a card. Nothing else writes the record.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from . import record as records

ROOT = records.ROOT
#: Tools of compute-sanitizer: accesses out of bounds, races in shared memory, wrong uses of barriers, and reads of
#: memory that nobody has written.
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
PARTS = ("suite", *TOOLS, "stand-in")
#: How often racecheck reports these kernels; the reports are counted apart, and any more are errors. It knows of
#: two threads that meet at a barrier, not of a lane that arrives for its warp after __syncwarp, nor of an order that
#: passes through a third thread, as that of the warp that feeds. All places that it names were looked up in the machine
#: code and are of these two kinds. The emulator follows both, and its tests marked `races` find none.
RACES_EXPLAINED = {
    "attention_sm90": 15,
    "attention_backward_sm90": 26,
    "attention_backward_keys_sm90": 57,
    "attention_backward_queries_sm90": 5,
    "block_products_sm90": 3,
    "gemm_sm80": 11,
    "gemm_sm90": 8,
}
#: Kernels whose last change a tool has not seen, because the time on a card had been used up. It found nothing in an
#: earlier version. The tests ask that this says no more and no less than the record.
WAITING: dict[str, set[str]] = {}
#: Folders of the machine that a message names: a record is for every machine.
_FOLDERS = re.compile(r"/(?:[\w.+-]+/)+")
#: Seconds of tests that the stand-in runs by default; everything else runs in the long profile.
_SAMPLE_SECONDS = 12.0
#: Many workers share the cores: threads of BLAS in each would wait for those of the others.
_ALONE = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
#: Under racecheck a test takes many times as long: one or two for each kernel with shared memory.
_RACES = (
    "tensor_core_product_scales or (matched_rows and 37) or (portable_product_is_right and float16-float16) "
    "or (rows_take_nothing and 3) or (rows_take_nothing and 6) "
    "or (odd_lengths and 129-64) or (own_length and float16-None) or (portable_garbage and nan) "
    "or (sparse_product_on and 112 and float16 and not bfloat16 and not ampere) "
    "or (sparse_product_on and ampere and float64 and not 112) or (that_meet and 50-40) "
    "or (those_of_the_reference and 13-7 and 1-8 and int32) or (gemm_few and nan_reaches) "
    "or (odd_lengths and 129-256 and not BackwardSm80) or (on_a_card and 0-129) "
    "or (backward_fused and float16-129 and not bfloat16) or (blocks_and_widths and 48 and not bfloat16) "
    "or (at_once and 70-30) or (tiles_of_a_list and CF and float16 and not bfloat16) or (list_are_those and int32) "
    "or order_is_that or (advance_is_that and 0-float64) or (column_major_operand and 48) or (copy_of_any and 48)"
)
#: Under memcheck tests take seconds too: those that go to the edges of their operands, one or two for each kernel.
_MEMORY = (
    "(masks_spoiled and float16-128 and 48) or (masks_spoiled and float32 and 48) or fp8_masks_spoiled "
    "or (portable_garbage and nan) or user_wrote_into_tables or (strides_alpha_beta and C-C) or indices_overwritten "
    "or (sparse_product_is_right and float32) or (segments and add-float16) or (expand_names and int32) "
    "or (reads_nothing_outside and 64) or (small_blocks_by_one_vector and 13 and float64) or (long_rows and 3) "
    "or (portable_product_is_right and float16-float16) or (sparse_product_on and float16 and 112 and not bfloat16) "
    "or (sparse_product_on and float64 and 112) or (sampled_product_since and CC and 112 and float32) "
    "or (sampled_product_on and CC and 112) or (through_shared_memory and 7) or (rows_take_nothing and 9) "
    "or (of_one_length and float64) or short_rows_of or (that_meet and 50-40) or meet_nothing "
    "or (those_of_the_reference and 13-7 and 3-8 and int64) or (spoiled_index_arrays and 2147483648 and int32) "
    "or (bands_at_odd_lengths and 129-64) or masks_of_elements or (plain_cores and float32) "
    "or beyond_the_capacity or (on_a_card and 129) or (backward_fused and 129 and not bfloat16) "
    "or (blocks_and_widths and 48 and not bfloat16) or (at_once and 70-30) or (what_the_host_stores and 80) "
    "or (tiles_of_a_list and CF and float16 and not bfloat16) or (list_are_those and int32) or order_is_that "
    "or (inner_products_are and 1-) or (its_ratio_from and 1-) or (advance_is_that and 1-float64) "
    "or (column_major_operand and 48) or (copy_of_any and 64) or every_element_"
)
#: initcheck does not see what the copy engine writes: for it, nobody has written the results of attention, gemm_sm90
#: and gemm_turned_sm90. It takes a copy of less than 16 bytes to shared memory (cp.async with a source size) for one of
#: 16, as at the end of A in spmm.
_UNSEEN = (
    "test_attention or through_shared_memory or blocks_and_widths or reads_nothing_outside or column_major_operand "
    "or copy_of_any"
)
_WRITTEN = f"({_MEMORY}) and not ({_UNSEEN})"


def run_tests(
    *args: str, report: Path, prefix: tuple[str, ...] = (), stand_in: bool = False
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], str]:
    """Run pytest; (what the plugin wrote, descriptions of launches, the output). A run cut off leaves what it has."""
    plugin = ("-p", "tests.record.plugin", f"--gpu-report={report}")
    command = [*prefix, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, *args]
    environment = {**os.environ, **_ALONE, "PYTHONPATH": str(ROOT), "BSRGEMM_STAND_IN": "1" if stand_in else "0"}
    written = report.with_suffix(".log")
    with written.open("w") as stream:
        subprocess.run(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, check=False, env=environment)
    said = written.read_text()
    nothing: dict[str, Any] = {"collected": None, "tests": []}
    return json.loads(report.read_text()) if report.exists() else nothing, records.read_table(report), said


def suite(
    folder: Path, workers: str, only: list[str], *, stand_in: bool = False
) -> tuple[dict[str, Any], dict[str, float]]:
    """A record of the tests marked `gpu`, or of some of them, and the seconds that each took."""
    report = folder / ("stand_in.json" if stand_in else "suite.json")
    found, table, said = run_tests("-n", workers, "-m", "gpu", *(only or ["tests"]), report=report, stand_in=stand_in)
    print("\n".join(said.splitlines()[-40:]), flush=True)
    seconds = {test["name"]: test["seconds"] for test in found["tests"]}
    return records.build(found, table, partial=bool(only)), seconds


def sanitize(tool: str, folder: Path, workers: str, only: str) -> dict[str, Any]:
    """The sanitizer-marked tests of the kernels under one tool of compute-sanitizer, and the kernels they launched."""
    prefix = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--launch-timeout", "0")
    prefix += ("--target-processes", "all", "--print-limit", "100000")  # reports are counted by their lines
    found, table, said = run_tests(
        *("-n", workers, "-m", "sanitizer", "-k", only, "tests/gpu"), prefix=prefix, report=folder / f"{tool}.json"
    )
    head, dirty = records.commit()
    return judged(tool, found, table, said) | {"commit": head, "dirty": dirty}


def joined(found: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What some of the tests have found now, with what the tool has found before beside it."""
    earlier = [*before.get("earlier", ()), {key: value for key, value in before.items() if key != "earlier"}]
    return {**found, "earlier": earlier}


def judged_again(tool: str, folder: Path, before: dict[str, Any]) -> dict[str, Any]:
    """An entry of the record from the logs of its run, whose reports were explained since."""
    report = folder / f"{tool}.json"
    found, said = json.loads(report.read_text()), report.with_suffix(".log").read_text()
    return {
        **judged(tool, found, records.read_table(report), said),
        **{key: before[key] for key in ("commit", "dirty", "earlier") if key in before},
    }


def judged(tool: str, found: dict[str, Any], table: dict[str, dict[str, Any]], said: str) -> dict[str, Any]:
    """What a run under a tool has found."""
    summaries = [int(n) for n in re.findall(r"ERROR SUMMARY: (\d+) error", said)]
    # Races in kernels whose reports are explained are counted apart.
    races = re.findall(r"Race reported between \w+ access at (\w+)\+", said)
    explained = {kernel: races.count(kernel) for kernel in RACES_EXPLAINED if kernel in races}
    totals = [int(n) for n in re.findall(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?", said)]
    summaries += [n - sum(explained.values()) for n in totals]
    if not summaries:
        raise SystemExit(f"compute-sanitizer --tool {tool} gave no summary")
    passed = [test for test in found["tests"] if test["outcome"] == "passed" and test.get("launches")]
    names = {name for test in passed for name, _ in records._runs(test["launches"]["names"])}
    kernels = sorted({(table[name]["entry"], table[name]["source"]) for name in names})
    return {
        "collected": found["collected"],
        **records.counted(found["tests"]),
        "errors": sum(summaries),
        "explained": explained,
        "kernels": [list(kernel) for kernel in kernels],
    }


def excused(card: dict[str, Any], stand_in: dict[str, Any]) -> dict[str, str]:
    """Tests whose launches cannot be compared on the stand-in, and why."""
    found = {}
    for name, test in card["tests"].items():
        other = stand_in["tests"].get(name)
        if other is None:
            found[name] = "not run on the stand-in"
        elif other["outcome"] != test["outcome"]:
            why = _FOLDERS.sub("", other.get("why", ""))
            found[name] = f"{other['outcome']} on the stand-in: {why}"[:200]
        elif (text := records.difference(card, stand_in, name)) is not None:
            found[name] = " ".join(text.removeprefix(f"{name}: ").split())[:200]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="8", help="pytest-xdist workers for the suite; 0 without xdist")
    parser.add_argument("--out", type=Path, default=records.PATH)
    parser.add_argument("--logs", type=Path, help="a folder in which to keep all that the runs have said")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="the others are left as recorded")
    parser.add_argument("--paths", nargs="+", default=[], help="some tests alone: the record says that it is partial")
    parser.add_argument(
        "--retire",
        nargs="+",
        default=[],
        help="with stand-in: tests that are not in the suite any more",
    )
    parser.add_argument(
        "--sanitized",
        metavar="EXPRESSION",
        help="with memcheck, racecheck, ...: of their tests only those that -k of pytest would take; what a tool has "
        "found before stays beside it, for kernels that have not changed since. A tool with errors repeats all tests",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="run nothing: judge the logs of sanitizers that --logs has kept, whose reports were explained since",
    )
    parser.add_argument("-k", dest="keyword", help="as that of pytest: the record says that it is partial")
    parser.add_argument(
        "--card", choices=("real", "stand-in"), default="real", help="stand-in: a rehearsal of the suite"
    )
    options = parser.parse_args()
    only = [*options.paths, *(["-k", options.keyword] if options.keyword else [])]
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
    before = records.load(options.out) if options.out.exists() else {}
    if options.again:
        if not options.logs or not set(options.parts) <= set(TOOLS):
            parser.error(f"--again: wanted --logs and --parts among {', '.join(TOOLS)}")
        found = {tool: judged_again(tool, options.logs, before["sanitizer"][tool]) for tool in options.parts}
        record = before | {"sanitizer": before["sanitizer"] | found}
        records.write(options.out, record)
        return _summary(before, record)
    keep = nullcontext(options.logs) if options.logs else tempfile.TemporaryDirectory()
    with keep as name, ThreadPoolExecutor() as pool:
        folder = Path(name)
        record = dict(before)
        if "suite" in options.parts:
            record, _ = suite(folder, options.workers, only, stand_in=options.card == "stand-in")
            # What other parts have seen is of the code that they ran on, which they name.
            record |= {key: before.get(key, {}) for key in ("sanitizer", "stand_in")} | {"sample": []}
            records.write(options.out, record)  # should what follows be cut off
        running: dict[str, Any] = {}
        clean = {t for t, part in before.get("sanitizer", {}).items() if not part["errors"] and not part["failed"]}
        in_part = clean if options.sanitized else set()

        def asked(tool: str, tests: str) -> str:
            return f"({tests}) and ({options.sanitized})" if tool in in_part else tests

        if "memcheck" in options.parts:
            tests = asked("memcheck", _MEMORY)
            running["memcheck"] = pool.submit(sanitize, "memcheck", folder, options.workers, tests)
        # A race is reported once in each process: these two run in one, so that their reports can be counted.
        for tool, workers, only_some in (
            ("racecheck", "0", _RACES), ("synccheck", "0", _RACES), ("initcheck", options.workers, _WRITTEN),
        ):  # fmt: skip
            if tool in options.parts:
                running[tool] = pool.submit(sanitize, tool, folder, workers, asked(tool, only_some))
        tools = {part: tool for tool, part in running.items()}
        for part in as_completed(tools):  # what is there stays there, should the others be cut off
            tool, found = tools[part], part.result()
            if tool in in_part:
                found = joined(found, before["sanitizer"][tool])
            record["sanitizer"] = record.get("sanitizer", {}) | {tool: found}
            records.write(options.out, record)
        if "stand-in" in options.parts:
            rehearsed, seconds = suite(folder, options.workers, only, stand_in=True)
            records.retire(record, set(options.retire) - rehearsed["tests"].keys())
            found = excused(record, rehearsed)
            if only:  # what is known of the other tests stays
                found = {name: why for name, why in found.items() if name in rehearsed["tests"]}
                others = record.get("stand_in", {}).items()
                found |= {n: why for n, why in others if n not in rehearsed["tests"] and n in record["tests"]}
            else:
                record["sample"] = records.chosen(record, seconds, _SAMPLE_SECONDS)
            record["stand_in"] = found
            records.write(options.out, record)
    return _summary(before, record)


def _summary(before: dict[str, Any], record: dict[str, Any]) -> int:
    """Print what the record says; the exit status."""
    print(json.dumps({key: record[key] for key in ("card", "commit", "dirty", "partial", "suite")}))
    changed = records.changed_checksums(before, record)
    for name, (old, new) in changed.items():
        print(f"{name}: other bits than in the last record: {old} then, {new} now")
    left_out = record.get("stand_in", {})
    print(f"{len(left_out)} of {len(record['tests'])} tests cannot be compared on the stand-in")
    found = records.problems(record)
    print("\n".join(found))
    return 1 if found or changed else 0


if __name__ == "__main__":
    sys.exit(main())
