"""Which half of a test that runs twice, plainly and watched for races, a run of everything takes."""

from __future__ import annotations

import zlib


def left_out(test: str, watches: bool) -> bool:
    """Return whether this half is left to the long profile: one test in three is watched, the others run plainly."""
    return watches != (zlib.crc32(test.encode()) % 3 == 0)
