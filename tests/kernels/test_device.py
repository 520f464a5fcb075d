"""Facts of a device are those of the device in use, whichever was asked first."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import pytest

pytest.importorskip("cupy")

from bsrgemm._kernels import device

FACTS = {
    "multiprocessors": "MultiProcessorCount",
    "l2_bytes": "L2CacheSize",
    "shared_bytes_per_block": "MaxSharedMemoryPerBlockOptin",
}


@pytest.mark.parametrize("fact", FACTS)
def test_each_device_answers_for_itself(fact: str) -> None:
    current = [0]
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(getDevice=lambda: current[0]),
        Device=lambda number: SimpleNamespace(attributes={FACTS[fact]: 100 + number}),
    )
    device._attribute.cache_clear()
    with patch.object(device, "cupy", SimpleNamespace(cuda=cuda)):
        for number in (0, 1, 0, 2, 1):
            current[0] = number
            assert getattr(device, fact)() == 100 + number
    device._attribute.cache_clear()
