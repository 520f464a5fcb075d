"""A switch that forces products and attention onto one kernel, for tests and benchmarks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

#: Class name of the kernel config that `force_kernel` selected, such as "GemmSm80"; None lets the rules choose.
name: str | None = None


@contextlib.contextmanager
def force_kernel(config: str) -> Iterator[None]:
    """Within this context, products and attention use the kernel `config` ("GemmSm80", ...) or raise ValueError."""
    global name
    before, name = name, config
    try:
        yield
    finally:
        name = before
