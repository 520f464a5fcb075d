"""Kernels whose sources differ and whose machine code does not: figures of one are figures of the other.

`bench/publish/same_code.py` compiles both and writes bench/publish/same_code.json; `same` reads it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from functools import cache
from pathlib import Path

#: For each kernel, groups of digests of sources that were compiled to the same machine code.
FILE = Path(__file__).resolve().parents[2] / "bench" / "publish" / "same_code.json"

#: The header of an ELF file of 64 bits: the place of the table of sections, the bytes of an entry, the number of
#: entries, and the entry of the section with all names; then an entry: name, place and size of a section.
_HEADER, _SECTION = struct.Struct("<40x Q 10x HHH"), struct.Struct("<I 20x QQ")


def code_of(cubin: bytes) -> str:
    """Return a digest of the instructions, constants and variables of a binary.

    Names, remarks and the like are left out. So is the table of the addresses of variables, constant bank 4: it has
    zeros until the binary is loaded, and a place for each `constexpr` of the source, used or not. The values of
    these count, unless they are 0.
    """
    table, step, count, names = _HEADER.unpack_from(cubin)
    sections = [_SECTION.unpack_from(cubin, table + step * number) for number in range(count)]
    start = sections[names][1]
    found = hashlib.sha256()
    for name, place, size in sections:
        title = cubin[start + name : cubin.index(0, start + name)]
        if title.startswith((b".text.", b".nv.constant", b".nv.global.init")) and title != b".nv.constant4":
            found.update(title + struct.pack("<Q", size) + cubin[place : place + size])
    return found.hexdigest()


@cache
def _groups() -> dict[str, list[list[str]]]:
    """The groups of the file; none where there is no checkout."""
    if not FILE.is_file():
        return {}
    found: dict[str, list[list[str]]] = json.loads(FILE.read_text(encoding="utf-8"))["kernels"]
    return found


def same(kernel: str, digest: str, other: str | None) -> bool:
    """Return whether two digests of the sources of a kernel are known to have the same machine code."""
    return digest == other or any(digest in group and other in group for group in _groups().get(kernel, []))


def joined(groups: list[list[str]], digest: str, other: str) -> list[list[str]]:
    """Return the groups with these two digests in one of them.

    >>> joined([["a", "b"], ["c"]], "b", "d")
    [['c'], ['a', 'b', 'd']]
    """
    touched = [group for group in groups if digest in group or other in group]
    members = dict.fromkeys([name for group in touched for name in group] + [digest, other])
    return [group for group in groups if group not in touched] + [list(members)]
