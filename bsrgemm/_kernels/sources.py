"""Functions that find the CUDA sources, gather the headers that a source includes, and hash the result.

A source includes headers as `#include "name.cuh"`, with names relative to the top of the cuda folder. Nothing from
outside that folder is gathered.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

_PACKAGE = Path(__file__).resolve().parents[1]

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


def cuda_root() -> Path:
    """Return the folder of the CUDA sources: it is inside the package in a wheel, and next to it in a checkout."""
    candidates = (_PACKAGE / "cuda", _PACKAGE.parent / "cuda")
    for folder in candidates:
        # NVIDIA's Python packages install a folder `cuda` next to this package; that folder holds no .cu file.
        if any(folder.glob("*.cu")):
            return folder
    raise FileNotFoundError(
        f"the CUDA sources of bsrgemm are neither in {candidates[0]} (an installed wheel) "
        f"nor in {candidates[1]} (a checkout); reinstall bsrgemm"
    )


def gather(source: str, root: Path | None = None) -> dict[str, str]:
    """Return the text of `source` and, recursively, of every header it includes, by name, with `source` first."""
    root = cuda_root() if root is None else root
    texts: dict[str, str] = {}
    pending = [(source, "")]
    while pending:
        name, includer = pending.pop()
        if name in texts:
            continue
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"source {name!r}{includer}: expected a name relative to, and inside, {root}")
        try:
            texts[name] = (root / path).read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise FileNotFoundError(f"CUDA source {name!r}{includer} is not in {root}") from error
        included = _INCLUDE.findall(_COMMENT.sub("", texts[name]))
        pending += [(header, f" (included by {name!r})") for header in reversed(included)]
    return texts


def digest(texts: Mapping[str, str]) -> str:
    """Return the SHA-256 digest of names and texts. Any edit changes it."""
    sha = hashlib.sha256()
    for name in sorted(texts):
        for part in (name.encode(), texts[name].encode()):
            sha.update(len(part).to_bytes(8, "little"))
            sha.update(part)
    return sha.hexdigest()
