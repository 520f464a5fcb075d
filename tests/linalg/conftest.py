"""The fake device, for tests of solvers on it."""

from __future__ import annotations

from typing import Any

import pytest

from .. import fake_device


@pytest.fixture
def fake() -> Any:
    return fake_device.install()
