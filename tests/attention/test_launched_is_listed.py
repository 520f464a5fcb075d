"""What gradients launch can be compiled ahead of time: `every` of their kernels lists it. Nothing is computed here."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import bsrgemm as bg
from bsrgemm._attention.backward import BACKWARD
from bsrgemm._kernels.jit import KernelSpec
from bsrgemm.dtypes import BFLOAT16, DEVICE_DTYPES

from ..fake_cupy import Card, Policy, installed

F16, F32, F64 = (np.dtype(x) for x in (np.float16, np.float32, np.float64))


def listed(arch: str) -> set[KernelSpec]:
    return {x.spec() for kernel in BACKWARD for x in kernel.every(DEVICE_DTYPES) if x.runs_on(arch)}


class Noted:
    """A card of an architecture that notes the kernels of gradients that `attention_backward` launches on it."""

    def __init__(self, arch: str) -> None:
        self.card = Card(arch, policy=Policy.RECORD)

    def seen(self, *args: Any, **options: Any) -> set[KernelSpec]:
        import cupy

        some = [cupy.asarray(x) for x in args]
        self.card.launches.clear()
        bg.attention_backward(*some, **options)
        entries = {kernel.entry for kernel in BACKWARD}
        return {launch.spec for launch in self.card.launches if launch.entry in entries}


def gradients(noted: Noted, dtype: Any, dims: tuple[int, int]) -> set[KernelSpec]:
    """The kernels for heads of so many columns: in every order, with every kind of mask, with results of each dtype."""
    q, k, v = (np.ones((1, *shape), dtype) for shape in ((2, 70, dims[0]), (1, 90, dims[0]), (1, 90, dims[1])))
    dout, lse = np.ones((1, 2, 70, dims[1]), dtype), np.ones((1, 2, 70), F32)
    masks = [bg.BlockMask.random(70, 90, per_row=1, block=block, device="cpu") for block in (64, 128)]
    found: set[KernelSpec] = set()
    for out, deterministic, options in itertools.product(
        (dtype, F32),
        (True, False),
        ({}, {"softcap": 2.0}, {"softcap": 0.1}, *({"mask": mask.to_device("cuda")} for mask in masks)),
    ):
        more: dict[str, Any] = {"deterministic": deterministic, **options}
        found |= noted.seen(dout, q, k, v, dout.astype(out), lse, **more)
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
def test_kernels_of_gradients_are_listed(arch: str, names: set[str]) -> None:
    sizes = ((64, 64), (40, 24), (128, 100), (32, 192), (256, 129))
    noted = Noted(arch)
    with installed(noted.card):
        seen = {x for dtype in (F16, BFLOAT16) for dims in sizes for x in gradients(noted, dtype, dims)}
    assert seen <= listed(arch)
    others = {"attention_delta", *(["turn_order"] if "sm90" in names else [])}
    assert {spec.entry for spec in seen} == others | {f"attention_backward_{name}" for name in names}


@pytest.mark.parametrize(
    ("dtype", "dout_dtype"),
    [(F16, F16), (F16, F32), (BFLOAT16, BFLOAT16), (BFLOAT16, F32), (F32, F32), (F64, F64)],
    ids=str,
)
def test_kernels_of_gradients_on_cuda_cores_are_listed(dtype: Any, dout_dtype: Any) -> None:
    """At the sizes of which the list has examples."""
    known, noted = listed("sm_75"), Noted("sm_75")
    with installed(noted.card):
        for dim, softcap, out in itertools.product((32, 64, 256), (None, 2.0), {dtype, dout_dtype}):
            q, k, v = (np.ones((1, 2, 40, dim), dtype) for _ in range(3))
            dout, lse = np.ones(q.shape, dout_dtype), np.ones((1, 2, 40), F64 if dtype == F64 else F32)
            seen = noted.seen(dout, q, k, v, dout.astype(out), lse, softcap=softcap)
            assert {spec.entry for spec in seen} == {"attention_delta", "attention_backward_simt"}
            assert seen <= known
