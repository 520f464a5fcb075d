"""Where figures come from: the commit that was measured, and digests of the kernels that were launched.

`recording` wraps `bsrgemm._kernels.jit.load`, so that every launch of a kernel that is loaded inside it is recorded.
A file of results keeps a digest of the code of each, comments and blanks left out; `changed` says whether the code is
another one by now.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from .._kernels import jit
from .._kernels.sources import code_digest, gather
from . import machine_code

#: Digits of a digest that are kept
_DIGITS = 16
_ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------------------------------- commit
class _Told(argparse.Action):
    """Stores the value of `--commit`."""

    commit: str | None = None

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        _Told.commit = values


def add_option(parser: argparse.ArgumentParser) -> None:
    """Let the command line name the commit, for a machine that has the files but not their history."""
    text = "the commit that is measured, where there is no git to ask; with a + where files differ from it"
    parser.add_argument("--commit", metavar="HASH", action=_Told, help=text)


def commit(root: Path = _ROOT) -> dict[str, Any]:
    """The commit of a checkout, and whether tracked files differ from it; both None where there is none.

    What the command line says comes first: a copy of a checkout may have the history of another commit.
    """
    told = _Told.commit
    if told:
        return {"commit": told.rstrip("+"), "dirty": told.endswith("+")}
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
    """The kernels that were launched since `take` was last called."""

    def __init__(self) -> None:
        self._new: dict[str, None] = {}

    def note(self, spec: jit.KernelSpec) -> None:
        self._new[str(spec)] = None

    def take(self) -> dict[str, str]:
        """Names and digests of the kernels since the last call, sorted."""
        names, self._new = sorted(self._new), {}
        return {name: digest(name) for name in names}


class _Noted:
    """A kernel whose launches are recorded; everything else is passed on to the kernel."""

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
def recording(by_load: bool = False) -> Iterator[Launched]:
    """Kernels that are loaded inside this block are noted each time they are launched, inside it or later.

    `by_load`: they are noted when they are loaded, and handed on as they are. Noting a launch takes the host about
    0.2 us, which host times are not to have in them.
    """
    plain, found = jit.load, Launched()
    _listening.append(found)
    if not _listening[1:]:

        def load(spec: jit.KernelSpec, arch: str, **options: Any) -> Any:
            if by_load:
                found.note(spec)
                return plain(spec, arch, **options)
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


def changed(kernels: Mapping[str, str]) -> bool:
    """Whether the code of any of these kernels differs from the given digests, or its digest is not known.

    Sources that are known to have the same machine code do not differ.
    """
    return not kernels or not all(machine_code.same(name, known, _digest_now(name)) for name, known in kernels.items())


def _digest_now(name: str) -> str | None:
    """The digest of a kernel, or None if its source is not there any more."""
    try:
        return digest(name)
    except FileNotFoundError:
        return None


def stale(found: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether a row of a file of results was measured with other code, or nobody knows with which.

    A row that launched nothing itself, as what is measured in other processes, is judged by all rows of its file.
    Figures of the CPU have no kernels: they are known by their commit.
    """
    if "card" not in found["machine"]:
        return not found.get("commit")
    everything = {name: known for each in found["rows"] for name, known in each.get("kernels", {}).items()}
    return changed(row.get("kernels") or everything)
