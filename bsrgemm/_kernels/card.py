"""What a launch has to know of a card. `card()` describes CuPy's current device; tests give a card of their own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Card:
    """A card: its architecture, its size, and the rates from which times are predicted.

    >>> Card("sm_90a", 132).shared_kb, Card("sm_80", 108).shared_kb
    (227, 163)
    """

    #: what kernels are compiled for, such as "sm_90a"
    arch: str
    multiprocessors: int
    l2_bytes: int = 50 << 20
    #: the most shared memory that a CTA can request
    shared_bytes: int = 227 << 10
    #: bytes per second from memory, and cycles per second
    bandwidth: float = 4.8e12
    clock: float = 1.98e9

    @property
    def shared_kb(self) -> int:
        """The most shared memory that one CTA can request, in KiB, as kernels are chosen by."""
        return shared_kb(self.arch)


def card() -> Card:
    """Return CuPy's current device. Each device is asked once."""
    import cupy

    return _described(cupy.cuda.runtime.getDevice())


@cache
def _described(device: int) -> Card:
    import cupy

    from .jit import device_target

    about = cupy.cuda.Device(device).attributes
    return Card(
        device_target(),
        int(about["MultiProcessorCount"]),
        int(about["L2CacheSize"]),
        int(about["MaxSharedMemoryPerBlockOptin"]),
        # Two transfers for each cycle of the memory's clock (kHz), and the bits of its bus.
        2e3 * about.get("MemoryClockRate", 0) * about.get("GlobalMemoryBusWidth", 0) / 8 or Card.bandwidth,
        1e3 * about.get("ClockRate", 0) or Card.clock,
    )


def number_of(arch: str) -> int:
    """Return the number of an architecture: 90 for "sm_90a"."""
    return int(arch.removeprefix("sm_").rstrip("af"))


def tensor_arch(arch: str) -> bool:
    """Return whether a card has asynchronous copies and the tensor-core instructions of Ampere (sm_80)."""
    return number_of(arch) >= 80


def shared_kb(arch: str) -> int:
    """Return the most shared memory that one CTA can request, in KiB. A multiprocessor has 1 KiB more."""
    number = number_of(arch)
    return 163 if number in (80, 87) else 227 if 90 <= number < 120 else 99


@cache
def reaches(arch: str, needs: str) -> bool:
    """Return whether an architecture is at least `needs`, or that one alone if `needs` ends in a letter.

    >>> reaches("sm_90a", "sm_80"), reaches("sm_120", "sm_90a")
    (True, False)
    """
    return arch == needs if needs[-1].isalpha() else number_of(arch) >= number_of(needs)
