"""Which kernels there are, read from the CUDA sources."""

from __future__ import annotations

import re

from bsrgemm._kernels import sources

_ENTRY = re.compile(r'extern "C" __global__ void (?:__launch_bounds__ ?\((?:[^()]|\([^()]*\))*\) ?)?(\w+) ?\(')


def _sources() -> dict[str, str]:
    return {path.stem: path.name for path in sorted(sources.cuda_root().glob("*.cu"))}


def _entries(source: str) -> list[str]:
    return _ENTRY.findall(sources.strip((sources.cuda_root() / source).read_text(encoding="utf-8")))


#: Kernel -> (its source, the functions that can be launched). A kernel is named as its file.
KERNELS: dict[str, tuple[str, list[str]]] = {stem: (name, _entries(name)) for stem, name in _sources().items()}
#: Function that can be launched -> its source.
ENTRIES: dict[str, str] = {entry: source for source, entries in KERNELS.values() for entry in entries}


def uses_shared_memory(source: str) -> bool:
    """Is there anything for racecheck to look at?"""
    return any("__shared__" in sources.strip(text) for text in sources.gather(source).values())
