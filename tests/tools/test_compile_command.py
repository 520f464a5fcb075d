"""The kernels that `python -m bsrgemm compile` compiles by default: few enough to wait for, and those calls need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bsrgemm.__main__ import main
from bsrgemm._attention import backward
from bsrgemm._attention.choose import choose
from bsrgemm._attention.decode_kernel import Decode
from bsrgemm._attention.forward import PLAIN, SIGNED, has_large_shared
from bsrgemm._attention.forward import Problem as AttentionProblem
from bsrgemm._cli import compile as compile_command
from bsrgemm._cli.common_kernels import common_kernels
from bsrgemm._kernels import element_types
from bsrgemm._kernels.card import Card
from bsrgemm._products.call import Problem
from bsrgemm._products.prepared import compiled_for
from bsrgemm.dtypes import BFLOAT16, accumulator_dtype

from ..kernels import variants

ARCHS = ("sm_75", "sm_80", "sm_90a", "sm_120")
HALF, SINGLE, DOUBLE = (np.dtype(c) for c in "efd")
each_arch = pytest.mark.parametrize("arch", ARCHS)


@each_arch
def test_the_default_set_takes_two_minutes_at_most_on_two_cores(arch: str) -> None:
    jobs = [(arch, spec) for spec in compile_command.common_specs(arch)]
    assert 100 < len(jobs) == len(set(jobs))
    assert compile_command.estimate(jobs, threads=2) <= 120


@each_arch
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16, SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize(("block", "columns"), [(3, 1), (2, 16), (16, 1), (16, 128), (64, 128), (128, 4096)])
def test_common_products_are_in_the_default_set(arch: str, dtype: Any, block: int, columns: int) -> None:
    names = element_types.types(dtype, dtype, dtype, accumulator_dtype(dtype), np.dtype(np.int32))
    rows = 8192 // block
    problem = Problem(arch, names, block, block, columns, 1, rows, rows, 27 * rows, False, "C", "C", True, True)
    listed = compile_command.common_specs(arch)
    assert compiled_for(problem, Card(arch, 132)).spec() in listed


@each_arch
@pytest.mark.parametrize("width", [64, 128])
def test_common_attention_and_decode_are_in_the_default_set(arch: str, width: int) -> None:
    listed = compile_command.common_specs(arch)
    for dtype in (HALF, BFLOAT16):
        sizes = (width, width, PLAIN, True, True, 32 * 4096, 4096)
        assert choose(AttentionProblem(arch, dtype, dtype, SINGLE, *sizes)).spec() in listed
        for rows in (1, 8, 32):
            kernel = Decode.of(dtype, width, width, rows)
            assert (kernel.spec() in listed) == kernel.runs_on(arch)


@each_arch
def test_every_kernel_of_the_default_set_runs_on_the_target(arch: str) -> None:
    for kernel in common_kernels(arch, [HALF, BFLOAT16, SINGLE, DOUBLE]):
        assert not hasattr(kernel, "runs_on") or kernel.runs_on(arch), kernel


def test_every_kernel_of_the_sources_can_be_asked_for() -> None:
    assert set(compile_command.kernel_names()) == set(variants.kernels())


@each_arch
@pytest.mark.parametrize("width", [64, 256])
def test_gradients_of_attention_can_be_compiled_ahead(arch: str, width: int) -> None:
    listed = set(compile_command.specs(arch=arch))
    for dtype in (HALF, BFLOAT16, SINGLE, DOUBLE):
        acc, name = accumulator_dtype(dtype), element_types.element(dtype)
        problem = backward.BackwardProblem(arch, dtype, dtype, acc, width, width, SIGNED)
        assert {part.spec() for part in backward.choose(problem).parts()} <= listed
        assert backward.AttentionDelta(name, name, element_types.element(acc)).spec() in listed
    around = {spec.entry for spec in listed} & {"attention_backward_begin", "attention_backward_end"}
    assert len(around) == (2 if has_large_shared(arch) else 0)


def listing(capsys: pytest.CaptureFixture[str], *options: str) -> set[str]:
    assert main(["compile", "--list", "--arch", "sm_90a", *options]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"{len(lines)} kernels")
    return set(lines)


def test_options_narrow_and_widen_the_default_set(capsys: pytest.CaptureFixture[str]) -> None:
    default = listing(capsys)
    half = listing(capsys, "--dtype", "float16")
    some = listing(capsys, "--kernel", "spmv_small")
    everything = listing(capsys, "--all", "--dtype", "float16")
    assert half < default and half < everything
    assert all("spmv_small.cu" in line for line in some) and len(some) > 1000
    assert len(everything) > 10 * len(half)


def test_count_and_estimate_are_printed_before_the_first_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cupy")
    said: list[str] = []

    def build_all(jobs: Any, step: Any) -> compile_command.Summary:
        said.append(capsys.readouterr().out)
        return compile_command.Summary(built=len(jobs))

    monkeypatch.setattr(compile_command, "build_all", build_all)
    monkeypatch.setattr(compile_command, "_threads", lambda: 2)
    assert main(["compile", "--arch", "sm_90a"]) == 0
    count = len(compile_command.common_specs("sm_90a"))
    assert said[0].startswith(f"{count} kernels for sm_90a with NVRTC ")
    assert "about" in said[0] and "seconds with 2 threads if none is in the cache" in said[0]


def test_a_reader_that_stops_early_ends_the_list_quietly() -> None:
    command = [sys.executable, "-m", "bsrgemm", "compile", "--list", "--kernel", "spmv_small"]
    root = Path(compile_command.__file__).parents[2]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 1 and said == b""
