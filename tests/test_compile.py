"""Every kernel compiles for every target without a GPU: no error, no spill, no warning, in time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from bsrgemm import jit, tuning

pytest.importorskip("cupy")

TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
#: TARGETS.md's bound for one variant, with room for a machine under load.
SECONDS = 3.0


def _kind(config: tuning.Config) -> tuple[str, ...]:
    """What sets a config apart for the compiler: kernel, element type and the largest tile of it."""
    types = getattr(config, "types", None)
    element = types.a if types else getattr(config, "element", "")
    layout = (
        str((config.tail, config.tile_m, config.b_transposed, config.tma_store, config.types.c))
        if isinstance(config, tuning.GemmSm90)
        else ""
    )
    return type(config).__name__, element, getattr(config, "operation", layout)


def spanning() -> Iterator[tuning.Config]:
    """One config of each kernel, element type and operation: the one with the most registers at stake, and one with
    64-bit indices."""
    largest: dict[tuple[str, ...], tuning.Config] = {}
    for config in tuning.every_config():
        size = sum(v for v in vars(config).values() if isinstance(v, int))
        best = largest.get(_kind(config))
        if best is None or size >= sum(v for v in vars(best).values() if isinstance(v, int)):
            largest[_kind(config)] = config
    for kind, config in largest.items():
        # min/max over segments differ in one comparison: a few types stand for all
        if kind[0] != "Segment" or kind[2] == "kAdd" or kind[1] in ("i8", "u64", "bf16", "f64", "c128", "boolean"):
            yield config


def check(config: tuning.Config, arch: str) -> None:
    if isinstance(config, tuning.GemmSm90) and arch != "sm_90a":
        return
    compiled = jit.compile_cubin(config.spec(), arch)
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", compiled.log)]
    assert spills, f"no resource report in the log:\n{compiled.log}"
    assert not any(spills), compiled.log
    assert "warning" not in compiled.log.lower(), compiled.log
    assert not re.search(r"C75\d\d", compiled.log), compiled.log
    assert compiled.seconds <= SECONDS


def _chunks(items: list[Any], size: int) -> list[list[Any]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


_SPANNING = list(spanning())


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("part", range(len(_chunks(_SPANNING, 16))))
def test_spanning_configs_compile_cleanly(arch: str, part: int) -> None:
    for config in _chunks(_SPANNING, 16)[part]:
        check(config, arch)


@pytest.mark.long
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("part", range(32))
def test_every_config_compiles_cleanly(arch: str, part: int) -> None:
    for config in list(tuning.every_config())[part::32]:
        check(config, arch)


def test_tuning_returns_only_listed_configs() -> None:
    listed = set(tuning.every_config())
    for R in (1, 2, 3, 5, 8, 16, 33, 128):
        for N in (1, 2, 3, 9, 31, 32, 65, 127, 4096):
            for C in (1, 2, 3, 8, 9, 15, 16, 64):
                for dtype in tuning.DEVICE_DTYPES:
                    for index in ("i4", "i8"):
                        acc = tuning.accumulator_dtype(dtype)
                        names = tuning.types(dtype, dtype, dtype, acc, tuning.np.dtype(index))
                        assert tuning.spmm(names, R, C, N) in listed


def test_span_covers_every_kernel_and_dtype() -> None:
    kinds = {_kind(c)[:2] for c in _SPANNING}
    assert {k[0] for k in kinds} == {"GemmSimt", "GemmSm90", "Spmv", "Pairs", "Segment", "Expand"}
    assert {k[1] for k in kinds if k[0] == "GemmSimt"} == {tuning.element(d) for d in tuning.DEVICE_DTYPES}
