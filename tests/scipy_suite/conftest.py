"""The dtypes that scipy's tests go through: those of the class that is tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .point import narrowed


@pytest.fixture(autouse=True)
def dtypes_of_the_class(request: pytest.FixtureRequest) -> Iterator[None]:
    with narrowed(request.cls.dtypes):
        yield
