"""Where figures come from: the commit that was measured, and digests of the kernels that were launched.

`recording` wraps `bsrgemm._kernels.jit.load`, so that every kernel that is loaded inside it tells when it is launched.
A file of results keeps a digest of the code of each, comments and blanks left out; `changed` says whether the code is
another one by now.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from .._kernels import jit
from .._kernels.sources import code_digest, gather

#: Digits of a digest that are kept
_DIGITS = 16
_ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------------------------------- commit
def commit(root: Path = _ROOT) -> dict[str, Any]:
    """The commit of a checkout, and whether tracked files differ from it; both None where there is none."""
    try:
        found = _git(root, "rev-parse", "HEAD")
        dirty = bool(_git(root, "status", "--porcelain", "--untracked-files=no", "--", "bsrgemm", "cuda"))
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
    return {"commit": found, "dirty": dirty}


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


# ------------------------------------------------------------------------------------------ kernels
class Launched:
    """The kernels that were launched: since `take` was last called, and all of them with their digests."""

    def __init__(self) -> None:
        self._new: dict[str, None] = {}
        self.digests: dict[str, str] = {}

    def note(self, spec: jit.KernelSpec) -> None:
        self._new[str(spec)] = None

    def take(self) -> list[str]:
        """The kernels since the last call, sorted; their digests are kept."""
        names, self._new = sorted(self._new), {}
        for name in names:
            self.digests[name] = digest(name)
        return names


class _Noted:
    """A kernel that tells when it is launched; everything else is the kernel's own."""

    def __init__(self, kernel: Any, spec: jit.KernelSpec) -> None:
        object.__setattr__(self, "_kernel", kernel)
        object.__setattr__(self, "_spec", spec)

    def __call__(self, *args: Any, **options: Any) -> Any:
        for each in _listening:
            each.note(self._spec)
        return self._kernel(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._kernel, name, value)


_listening: list[Launched] = []


@contextlib.contextmanager
def recording() -> Iterator[Launched]:
    """Kernels that are loaded inside this block are noted each time they are launched, inside it or later."""
    plain, found = jit.load, Launched()
    _listening.append(found)
    if not _listening[1:]:

        def load(spec: jit.KernelSpec, arch: str, **options: Any) -> Any:
            return _Noted(plain(spec, arch, **options), spec)

        jit.load = load
    try:
        yield found
    finally:
        _listening.remove(found)
        if not _listening:
            jit.load = plain


# ------------------------------------------------------------------------------------------ digests
def digest(name: str) -> str:
    """The digest of the code of a kernel, given as `str` of its KernelSpec: source:entry and definitions."""
    return _source_digest(name.partition(":")[0])


@cache
def _source_digest(source: str) -> str:
    return code_digest(gather(source))[:_DIGITS]


def changed(kernels: Mapping[str, str], names: Iterable[str] | None = None) -> bool:
    """Whether the code of any of these kernels (by default: of all) is not what it was, or is not known.

    `kernels` are names with the digests they had. Nothing at all counts as not known.
    """
    asked = list(kernels if names is None else names)
    return not asked or any(kernels.get(name) != _digest_now(name) for name in asked)


def _digest_now(name: str) -> str | None:
    """The digest of a kernel, or None if its source is not there any more."""
    try:
        return digest(name)
    except FileNotFoundError:
        return None


def stale(found: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether a row of a file of results was measured with other code, or nobody knows with which.

    Figures of the CPU have no kernels: they are known by their commit.
    """
    if "card" not in found["machine"]:
        return not found.get("commit")
    kernels = found.get("kernels", {})
    return changed(kernels, row.get("kernels") or kernels)
