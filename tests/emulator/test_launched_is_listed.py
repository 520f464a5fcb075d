"""What is launched can be compiled ahead of time: `every_backward_config` lists it. Nothing is computed here."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._attention import backward_config
from bsrgemm._attention.host import ENGINE
from bsrgemm._kernels import jit
from bsrgemm._kernels.jit import KernelSpec
from bsrgemm.dtypes import BFLOAT16

from . import emulator

F16, F32, F64 = (np.dtype(x) for x in (np.float16, np.float32, np.float64))


class Idle:
    """A kernel that does nothing."""

    def __call__(self, *args: Any, **options: Any) -> None: ...


def launched(arch: str, folder: Path, *args: Any, **options: Any) -> set[KernelSpec]:
    """The kernels of `attention_backward` on a card of this architecture."""
    found: set[KernelSpec] = set()

    def load(spec: KernelSpec, arch: str) -> Idle:
        found.add(spec)
        return Idle()

    with (
        emulator.emulated(folder, arch=arch),
        patch.object(jit, "load", load),
        patch.object(ENGINE, "backward", emulator.run_backward),
    ):
        bg.attention_backward(*args, **options)
    return found


def gradients(arch: str, folder: Path, dtype: Any, dims: tuple[int, int]) -> set[KernelSpec]:
    """The kernels for heads of so many columns: in every order, with every kind of mask, with results of each dtype."""
    q, k, v = (np.ones((1, *shape), dtype) for shape in ((2, 70, dims[0]), (1, 90, dims[0]), (1, 90, dims[1])))
    dout, lse = np.ones((1, 2, 70, dims[1]), dtype), np.ones((1, 2, 70), F32)
    masks = [{"mask": bg.BlockMask.random(70, 90, per_row=1, block=block)} for block in (64, 128)]
    found: set[KernelSpec] = set()
    for out, deterministic, options in itertools.product(
        (dtype, F32), (True, False), ({}, {"softcap": 2.0}, {"softcap": 0.1}, *masks)
    ):
        more: dict[str, Any] = {"deterministic": deterministic, **options}
        found |= launched(arch, folder, dout, q, k, v, dout.astype(out), lse, **more)
    return found


@pytest.mark.parametrize(
    ("arch", "names"),
    [
        ("sm_80", {"sm80", "fused", "begin", "end"}),
        ("sm_89", {"sm80"}),
        ("sm_90a", {"sm80", "sm90", "keys_sm90", "queries_sm90", "begin", "end"}),
        ("sm_120", {"sm80"}),
    ],
)
def test_kernels_of_gradients_are_listed(arch: str, names: set[str], folder: Path) -> None:
    sizes = ((64, 64), (40, 24), (128, 100), (32, 192), (256, 129))
    seen = {x for dtype in (F16, BFLOAT16) for dims in sizes for x in gradients(arch, folder, dtype, dims)}
    configs = (c for c in backward_config.every_backward_config() if backward_config.runs_on(c, arch))
    assert seen <= {config.spec() for config in configs}
    others = {"attention_delta", *(["turn_order"] if "sm90" in names else [])}
    assert {spec.entry for spec in seen} == others | {f"attention_backward_{name}" for name in names}


@pytest.mark.parametrize(
    ("dtype", "dout_dtype"),
    [(F16, F16), (F16, F32), (BFLOAT16, BFLOAT16), (BFLOAT16, F32), (F32, F32), (F64, F64)],
    ids=str,
)
def test_kernels_of_gradients_on_plain_cores_are_listed(dtype: Any, dout_dtype: Any, folder: Path) -> None:
    """At the sizes of which the list has examples."""
    known = {config.spec() for config in backward_config.every_backward_config()}
    for dim, softcap in itertools.product((32, 64, 256), (None, 2.0)):
        q, k, v = (np.ones((1, 2, 40, dim), dtype) for _ in range(3))
        lse = np.ones((1, 2, 40), F64 if dtype == F64 else F32)
        for out in {dtype, dout_dtype}:
            dout = np.ones(q.shape, dout_dtype)
            seen = launched("sm_75", folder, dout, q, k, v, dout.astype(out), lse, softcap=softcap)
            assert {spec.entry for spec in seen} == {"attention_delta", "attention_backward_simt"}
            assert seen <= known
