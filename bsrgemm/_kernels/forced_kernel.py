"""Forces products and attention onto one kernel, for tests and benchmarks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

#: The class name of the kernel config that `force_kernel` asks for, such as "GemmSm80"; None lets the rules choose.
name: str | None = None


@contextlib.contextmanager
def force_kernel(config: str) -> Iterator[None]:
    """Inside this block products and attention run on one kernel ("GemmSm80", ...), or raise ValueError."""
    global name
    before, name = name, config
    try:
        yield
    finally:
        name = before
