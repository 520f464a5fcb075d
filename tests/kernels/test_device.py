"""Facts of a device are those of the device in use, whichever was asked first."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("cupy")

import cupy

from bsrgemm._kernels import card, jit


def test_each_device_answers_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    def attributes(number: int) -> dict[str, int]:
        names = ("MultiProcessorCount", "L2CacheSize", "MaxSharedMemoryPerBlockOptin", "ClockRate")
        rates = {"MemoryClockRate": number, "GlobalMemoryBusWidth": 8}
        return {name: 100 * i + number for i, name in enumerate(names)} | (rates if number else {})

    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: current[0])
    monkeypatch.setattr(cupy.cuda, "Device", lambda number: SimpleNamespace(attributes=attributes(number)))
    monkeypatch.setattr(jit, "device_target", lambda: f"sm_8{current[0]}")
    card._described.cache_clear()
    for number in (0, 1, 0, 2, 1):
        current[0] = number
        found = card.card()
        assert (found.arch, found.multiprocessors, found.l2_bytes) == (f"sm_8{number}", number, 100 + number)
        assert (found.shared_bytes, found.clock) == (200 + number, 1e3 * (300 + number))
        assert found.bandwidth == (2e3 * number if number else card.Card.bandwidth)
    card._described.cache_clear()
