"""Which variants of the kernels the compile tests take: all of them, or few in which every constant has every value."""

from __future__ import annotations

import itertools
import re
from functools import cache
from typing import Any

from bsrgemm import _kernel_index
from bsrgemm._kernels.jit import KernelSpec, cuda_root, gather
from bsrgemm._kernels.kernel import Kernel
from bsrgemm.dtypes import DEVICE_DTYPES

#: One target for each generation of cards. sm_90a is the card that results are measured on.
TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
MEASURED = "sm_90a"
#: The oldest target of the kernels whose source asks for the architecture.
AMPERE = "sm_80"
#: Targets between others: by default a kernel is compiled for one of these, in turn; in the long profile for all.
BETWEEN = ("sm_86", "sm_89", "sm_100")
#: In the long profile, constants with at most this many values (a layout, a type) are tried together with each other.
_CHOICES = 6

_BOUNDS = r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)"
_KERNEL = re.compile(rf'extern "C"\s+__global__\s+void\s+(?:{_BOUNDS}\s+)?(\w+)\(')


@cache
def kernels() -> dict[str, str]:
    """The file of each kernel, read from the sources alone."""
    found = {}
    for path in sorted(cuda_root().glob("*.cu")):
        code = re.sub("//.*", "", path.read_text(encoding="utf-8"))
        found |= {name: path.name for name in _KERNEL.findall(code)}
    return found


@cache
def text_of(kernel: str) -> str:
    """The source of `kernel` and its headers."""
    return "\n".join(gather(kernels()[kernel]).values())


@cache
def _listed() -> dict[str, dict[KernelSpec, Kernel]]:
    """By the name of their entry, the variants that can be asked for."""
    found: dict[str, dict[KernelSpec, Kernel]] = {}
    for kernel in _kernel_index.every(DEVICE_DTYPES):
        spec = kernel.spec()
        found.setdefault(spec.entry, {})[spec] = kernel
    return found


@cache
def every(kernel: str, target: str) -> list[KernelSpec]:
    """All variants of `kernel` that can be asked for on `target`."""
    return [spec for spec, variant in _listed()[kernel].items() if variant.runs_on(target)]


def listed_kernels() -> set[str]:
    """The kernels that are in the index."""
    return set(_listed())


def spanning(
    specs: list[KernelSpec], choices: int = 0, largest: bool = True, types: bool = False, few: bool = False
) -> list[KernelSpec]:
    """A few of `specs`, such that every definition (name and value) that one of them has is in one of the few.

    Two definitions that one of `specs` has are together in one of the few, if both have at most `choices` values. With
    `types` only definitions that are names count, not numbers; with `few` three values of a number. The one with the
    most that is still missing comes next; among equals it is the one with the largest numbers, which needs the most
    registers, or the smallest, which is compiled in the least time.
    """
    values: dict[str, set[str | int]] = {}
    for spec in specs:
        for name, value in spec.defines:
            values.setdefault(name, set()).add(value)
    counting = {name: some_of(found) if few else found for name, found in values.items()}
    bits: dict[Any, int] = {}
    masks = []
    for spec in specs:
        wanted: list[Any] = [spec.entry, *(d for d in spec.defines if isinstance(d[1], str) or not types)]
        wanted = [d for d in wanted if d == spec.entry or d[1] in counting[d[0]]]
        wanted += itertools.combinations([d for d in spec.defines if 2 <= len(values[d[0]]) <= choices], 2)
        masks.append(sum(1 << bits.setdefault(item, len(bits)) for item in wanted))
    sign = 1 if largest else -1
    sizes = [sign * sum(value for _, value in spec.defines if isinstance(value, int)) for spec in specs]
    missing, chosen = (1 << len(bits)) - 1, []
    while missing:
        best = max(range(len(specs)), key=lambda i: ((masks[i] & missing).bit_count(), sizes[i]))
        chosen.append(specs[best])
        missing &= ~masks[best]
    return chosen


def turn_of(kernel: str) -> str:
    """The one of the targets between others that the quick profile compiles `kernel` and others of its source for."""
    return BETWEEN[sorted(set(kernels().values())).index(kernels()[kernel]) % len(BETWEEN)]


def some_of(values: set[str | int]) -> set[str | int]:
    """All that are names; of numbers the smallest, the one in the middle and the largest."""
    names, numbers = {x for x in values if isinstance(x, str)}, sorted(x for x in values if isinstance(x, int))
    return names | {numbers[i] for i in (0, (len(numbers) - 1) // 2, -1) if numbers}


@cache
def span(kernel: str, target: str, few: bool = False) -> list[KernelSpec]:
    """A few variants of `kernel` for `target`: none where the kernel does not run.

    They give every constant every value on the measured card, or some of its values (`few`). A kernel whose source
    differs between architectures does so on Ampere, and has every type on the measured card. Every other target has one
    variant, and not the same one.
    """
    specs, differs = every(kernel, target), "__CUDA_ARCH__" in text_of(kernel)
    if target == MEASURED:
        return spanning(specs, types=differs, few=few)
    if target == AMPERE and differs:
        return spanning(specs, largest=False, few=few)
    one = spanning(specs, largest=False, types=True)
    turn = TARGETS.index(target) % max(1, len(one))
    return one[turn : turn + 1]


def quick(kernel: str, target: str) -> list[KernelSpec]:
    """The variants of `kernel` that the quick profile compiles for `target`."""
    return [] if target in BETWEEN and target != turn_of(kernel) else span(kernel, target, few=True)


@cache
def long(target: str) -> list[KernelSpec]:
    """What the long profile compiles for `target`: every kernel, with more definitions together."""
    return [spec for kernel in kernels() for spec in spanning(every(kernel, target), _CHOICES)]
