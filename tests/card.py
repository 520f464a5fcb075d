"""Run the GPU tests on a card and write tests/card.json: ``python -m tests.card``.

The file says what a card has seen: how many tests passed, what the sanitizers found, and for each kernel a digest of
what is compiled. tests/test_card.py compares the digests with the sources, on any machine.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bsrgemm._cli.compile import DEFAULT_DTYPES, specs
from bsrgemm._kernels import jit

from .code_digest import code_digest

ROOT = Path(__file__).parents[1]
PATH = Path(__file__).with_name("card.json")
_DIGITS = 16
_FOLDER = "BSRGEMM_KERNELS_LOADED"  # where tests leave the names of the kernels that they load
#: Under memcheck a test takes ten times as long: those that go to the edges of their operands, some for each kernel.
_MEMORY = (
    "masks_spoiled and float16-128 and 48", "masks_spoiled and float32 and 48", "fp8_masks_spoiled",
    "portable_garbage and nan", "user_wrote_into_tables", "strides_alpha_beta and C-C", "indices_overwritten",
    "sparse_product_is_right and float32", "segments and add-float16", "expand_names and int32",
    "reads_nothing_outside and 64", "small_blocks_by_one_vector and 13 and float64", "long_rows and 3",
    "portable_product_is_right and float16-float16", "sparse_product_on and float16 and 112 and not bfloat16",
    "sparse_product_on and float64 and 112", "sampled_product_since and CC and 112 and float32",
    "sampled_product_on and CC and 112", "through_shared_memory and 7", "rows_take_nothing and 9",
    "of_one_length and float64", "short_rows_of", "that_meet and 50-40", "meet_nothing",
    "those_of_the_reference and 13-7 and 3-8 and int64", "spoiled_index_arrays and 2147483648 and int32",
    "bands_at_odd_lengths and 129-64", "masks_of_elements", "plain_cores and float32", "beyond_the_capacity",
    "on_a_card and 129", "backward_fused and 129 and not bfloat16", "blocks_and_widths and 48 and not bfloat16",
    "at_once and 70-30", "what_the_host_stores and 80", "tiles_of_a_list and CF and float16 and not bfloat16",
    "list_are_those and int32", "order_is_that", "inner_products_are and 1-", "its_ratio_from and 1-",
    "advance_is_that and 1-float64", "column_major_operand and 48", "copy_of_any and 64", "every_element_",
)  # fmt: skip
#: Under racecheck and synccheck it takes a hundred times as long: one or two for each kernel with shared memory.
_RACES = (
    "tensor_core_product_scales", "matched_rows and 37", "portable_product_is_right and float16-float16",
    "rows_take_nothing and 3", "rows_take_nothing and 6", "odd_lengths and 129-64", "own_length and float16-None",
    "portable_garbage and nan", "sparse_product_on and 112 and float16 and not bfloat16 and not ampere",
    "sparse_product_on and ampere and float64 and not 112", "that_meet and 50-40",
    "those_of_the_reference and 13-7 and 1-8 and int32", "gemm_few and nan_reaches",
    "odd_lengths and 129-256 and not BackwardSm80", "on_a_card and 0-129",
    "backward_fused and float16-129 and not bfloat16", "blocks_and_widths and 48 and not bfloat16",
    "at_once and 70-30", "tiles_of_a_list and CF and float16 and not bfloat16", "list_are_those and int32",
    "order_is_that", "advance_is_that and 0-float64", "column_major_operand and 48", "copy_of_any and 48",
)  # fmt: skip
#: initcheck does not see what the copy engine writes: for it, nobody has written the results of attention, gemm_sm90
#: and gemm_turned_sm90. It takes a copy of less than 16 bytes to shared memory (cp.async with a source size) for one of
#: 16, as at the end of A in spmm.
_UNSEEN = (" and not (test_attention or through_shared_memory or blocks_and_widths or reads_nothing_outside "
           "or column_major_operand or copy_of_any)")  # fmt: skip
#: Reports are counted by their lines, so that many are printed.
_SANITIZER = ("compute-sanitizer", "--launch-timeout", "0", "--target-processes", "all", "--print-limit", "100000")
#: Which tests a tool runs, what it leaves out, and is it one process? A race is reported once in each.
TOOLS: dict[str, tuple[tuple[str, ...], str, bool]] = {
    "memcheck": (_MEMORY, "", False), "racecheck": (_RACES, "", True),
    "synccheck": (_RACES, "", True), "initcheck": (_MEMORY, _UNSEEN, False),
}  # fmt: skip
#: How often racecheck reports these kernels; more are errors. It knows of two threads that meet at a barrier, not of a
#: lane that arrives for its warp after __syncwarp, nor of an order that passes through a third thread, as that of the
#: warp that feeds. All places that it names were looked up in the machine code and are of these two kinds. The emulator
#: follows both, and its tests marked `races` find none.
RACES_EXPLAINED = {
    "attention_sm90": 15, "attention_backward_sm90": 26, "attention_backward_keys_sm90": 57,
    "attention_backward_queries_sm90": 5, "block_products_sm90": 3, "gemm_sm80": 11, "gemm_sm90": 8,
}  # fmt: skip


# -------------------------------------------------------------------------------------- what is compiled
def digests(listed: list[jit.KernelSpec] | None = None, root: Path | None = None) -> dict[str, str]:
    """For each kernel, named by its source and entry, a digest of its code and of the definitions it is compiled with.

    Comments, blanks and the order of definitions and variants change nothing. `listed` are all usual variants.
    """
    variants = defaultdict[tuple[str, str], set[str]](set)
    for spec in specs((*DEFAULT_DTYPES, "uint8")) if listed is None else listed:  # bytes may be fp8
        defines = sorted(f"{name}={value}" for name, value in spec.all_defines())
        variants[spec.source, spec.entry].add(" ".join(defines))
    codes = {source: code_digest(jit.gather(source, root)) for source in {name for name, _ in variants}}
    return {
        f"{source}:{entry}": hashlib.sha256("\n".join([codes[source], *sorted(found)]).encode()).hexdigest()[:_DIGITS]
        for (source, entry), found in sorted(variants.items())
    }


def pytest_configure() -> None:
    """As a plugin of pytest, note which kernels of the package are loaded."""
    if (folder := os.environ.get(_FOLDER)) is None:
        return
    load = jit.load

    def noted(spec: jit.KernelSpec, arch: str, *, root: Path | None = None) -> Any:
        if root is None:
            Path(folder, f"{spec.source}:{spec.entry}").touch()
        return load(spec, arch, root=root)

    jit.load = noted


# ------------------------------------------------------------------------------------------------- a run
def _pytest(*args: str, prefix: tuple[str, ...] = ()) -> tuple[dict[str, int], dict[str, str], set[str], str]:
    """(How many tests had which outcome, that of each, the kernels that they loaded, what was printed)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "kernels").mkdir()
        environment = os.environ | {_FOLDER: str(folder / "kernels")}
        command = [*prefix, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.card"]
        command += [f"--junitxml={folder / 'report.xml'}", *args]
        log = folder / "log"
        with log.open("w") as stream:
            subprocess.run(command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT, check=False)
        said = log.read_text(errors="replace")
        print("\n".join(said.splitlines()[-40:]), flush=True)
        (suite,) = ElementTree.parse(folder / "report.xml").getroot()
        tests = {f"{case.get('classname')}.{case.get('name')}": outcome(case) for case in suite.iter("testcase")}
        counts = {name: list(tests.values()).count(name) for name in ("passed", "skipped", "failed")}
        return counts, tests, {path.name for path in (folder / "kernels").iterdir()}, said


def outcome(case: ElementTree.Element) -> str:
    """Passed, skipped or failed; an error is a failure."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def by_module(outcomes: dict[str, str]) -> dict[str, dict[str, int]]:
    """How many tests of each module had which outcome."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for name, how in outcomes.items():
        found[re.split(r"\.(?:Test|test_[^.]*(?:\[|$))", name, maxsplit=1)[0]][how] += 1
    return {name: {how: count[how] for how in ("passed", "skipped", "failed")} for name, count in found.items()}


def sanitize(tool: str, workers: str) -> tuple[dict[str, Any], set[str]]:
    """What one tool of compute-sanitizer finds in some tests marked `sanitizer`, and the kernels that it has seen."""
    terms, left_out, in_one_process = TOOLS[tool]
    only = "(" + " or ".join(f"({term})" for term in terms) + ")" + left_out
    some = ("-n", "0" if in_one_process else workers, "-m", "sanitizer", "-k", only, "tests/gpu")
    counts, tests, kernels, said = _pytest(*some, prefix=(*_SANITIZER, "--tool", tool))
    missing = () if left_out else unmatched(terms, tests)
    return counts | reports(tool, said) | ({"unmatched": missing} if missing else {}), kernels


def unmatched(terms: tuple[str, ...], tests: Iterable[str]) -> list[str]:
    """The terms that select none of these tests, as -k of pytest would."""

    def selects(term: str, test: str) -> bool:
        return all((word.removeprefix("not ") in test) != word.startswith("not ") for word in term.split(" and "))

    return [term for term in terms if not any(selects(term.lower(), test.lower()) for test in tests)]


def reports(tool: str, said: str) -> dict[str, Any]:
    """The errors that compute-sanitizer has printed; reports of races that are explained are counted apart."""
    if tool != "racecheck":
        summaries, explained = re.findall(r"ERROR SUMMARY: (\d+) error", said), {}
    else:
        summaries = re.findall(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?", said)
        races = re.findall(r"Race reported between \w+ access at (\w+)\+", said)
        explained = {k: min(races.count(k), most) for k, most in RACES_EXPLAINED.items() if k in races}
    if not summaries:
        raise SystemExit(f"compute-sanitizer --tool {tool} gave no summary")
    return {"errors": sum(map(int, summaries)) - sum(explained.values())} | (
        {"explained": explained} if explained else {}
    )


def commit() -> str:
    """The commit of the checkout; SystemExit if files differ from it. BSRGEMM_COMMIT names it where there is no git."""
    if told := os.environ.get("BSRGEMM_COMMIT"):
        return told
    (head,), changed = (
        subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
        for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    )
    if others := [line[3:] for line in changed if line[3:] != PATH.relative_to(ROOT).as_posix()]:
        raise SystemExit(f"commit first: the file would name a commit that {', '.join(others)} differ from")
    return head


def about() -> dict[str, Any]:
    """The card and the versions that its tests depend on."""
    import cupy

    versions = {name: version(name) for name in ("numpy", "scipy", "hypothesis")}
    versions |= {"python": platform.python_version(), "cupy": cupy.__version__, "nvrtc": jit.nvrtc_version()}
    return {
        "date": datetime.date.today().isoformat(),
        "card": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "versions": versions,
    }


# ---------------------------------------------------------------------------------------------- the file
def with_suite(file: dict[str, Any], now: dict[str, str], loaded: set[str], found: dict[str, Any]) -> dict[str, Any]:
    """The file after a run of GPU tests. Of kernels that have changed, no sanitizer has seen anything.

    Kernels that these tests did not load stay, if they are as they were.
    """
    before = file.get("kernels", {})
    same = {name for name, digest in now.items() if before.get(name, [""])[0] == digest}
    ran = sorted(loaded & now.keys() | same)
    return file | found | {"kernels": {name: before[name] if name in same else [now[name]] for name in ran}}


def with_tool(file: dict[str, Any], seen: dict[str, str], tool: str, found: dict[str, Any]) -> dict[str, Any]:
    """The file after a run of one sanitizer, which has seen kernels with these digests."""
    clean = {tool} if not found["errors"] and not found["failed"] else set()
    kernels = dict(file["kernels"])
    for name in [name for name, digest in seen.items() if kernels.get(name, [""])[0] == digest]:
        digest, *tools = kernels[name]
        kernels[name] = [digest, *sorted({*tools} - {tool} | clean)]
    return file | {"kernels": kernels, "sanitizers": file.get("sanitizers", {}) | {tool: found}}


def written(file: dict[str, Any]) -> str:
    """As JSON with a line for each value, each kernel and each sanitizer."""
    lines = []
    for key, value in file.items():
        inner = (
            [f"  {json.dumps(x)}: {json.dumps(one)}" for x, one in value.items()]
            if key in ("tests", "sanitizers", "kernels")
            else []
        )
        lines.append(f"{json.dumps(key)}: " + ("{\n" + ",\n".join(inner) + "\n}" if inner else json.dumps(value)))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ["suite", *TOOLS]
    parser.add_argument("--parts", nargs="+", choices=parts, default=["suite"], help="the rest of the file stays")
    parser.add_argument("--workers", default="8", help="processes of pytest")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="what of the suite; other lines of the file stay")
    options = parser.parse_args()
    head, now, bad = commit(), digests(), 0
    file = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
    for part in sorted(options.parts, key=parts.index):
        if part == "suite":
            counts, outcomes, loaded, _ = _pytest("-n", options.workers, "-m", "gpu", *options.tests)
            tests = by_module(outcomes) if options.tests == ["tests"] else file.get("tests", {}) | by_module(outcomes)
            file = with_suite(file, now, loaded, {"commit": head, **about(), "tests": dict(sorted(tests.items()))})
            bad += counts["failed"]
        else:
            found, loaded = sanitize(part, options.workers)
            file = with_tool(file, {name: now[name] for name in loaded & now.keys()}, part, {"commit": head, **found})
            bad += found["errors"] + found["failed"] + len(found.get("unmatched", ()))
        PATH.write_text(written(file), encoding="utf-8")  # should what follows be cut off
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
