"""``python -m bsrgemm verify``: check this machine.

Every product, dtype and kernel is compared with dense NumPy in a wider dtype, on fresh random data. A check yields
cases; its line in the report shows the worst of them.
"""

from __future__ import annotations

import argparse
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .._backend.base import Backend
from .._backend.registry import cuda, host
from .._environment import cuda_problem
from ..dtypes import BFLOAT16, BOOL, accumulator_dtype, is_float
from .checks import CHECKS, Case, Check, Trial


@dataclass(frozen=True)
class Outcome:
    """The worst case of a check for one dtype on one device."""

    name: str
    dtype: str
    device: str
    error: float
    bound: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.bound  # NaN is not ok

    def __str__(self) -> str:
        status = "ok  " if self.ok else "FAIL"
        line = f"{status}  {self.name:<24}  {self.dtype:<10}  {self.device:<4}"
        line = f"{line}  {self.error:<8.2g}  {self.bound:<8.2g}"
        return line.rstrip() if self.ok else f"{line}  {self.detail}"


HEADER = f"{'':<4}  {'check':<24}  {'dtype':<10}  {'on':<4}  {'error':<8}  bound"


def run(
    checks: Iterable[Check] | None = None,
    backend: Backend | None = None,
    *,
    dtypes: Iterable[np.dtype[Any]] | None = None,
    seed: int = 0,
) -> Iterator[Outcome]:
    """Yield the outcomes of `checks` on `backend` for `dtypes`; by default all checks and dtypes on the CPU."""
    backend = host() if backend is None else backend
    checks = CHECKS if checks is None else tuple(checks)
    for dtype in backend.dtypes if dtypes is None else dtypes:
        for check in checks:
            if check.applies(backend, dtype):
                yield _outcome(check, backend, dtype, seed)


def _outcome(check: Check, backend: Backend, dtype: np.dtype[Any], seed: int) -> Outcome:
    # Every line has its own generator, so that one line can be repeated without the others.
    rng = np.random.default_rng([seed, zlib.crc32(f"{check.name} {dtype}".encode())])
    fill = partial(Outcome, check.name, str(dtype), backend.name)
    outcomes = []
    try:
        with np.errstate(all="ignore"):
            for case in check.cases(Trial(backend, rng, dtype)):
                outcomes.append(fill(*_error_and_bound(case, dtype), case.label))
                if not outcomes[-1].ok:
                    return outcomes[-1]
    except Exception as error:  # whatever a broken installation raises is the result of this line
        return fill(float("nan"), 0.0, f"{type(error).__name__}: {' '.join(str(error).split())}")
    return max(outcomes, key=lambda o: (o.error / o.bound if o.bound else 0.0, o.bound))


def _error_and_bound(case: Case, checked: np.dtype[Any]) -> tuple[float, float]:
    got, want, dtype = case.got, case.want, case.dtype or checked
    if got.shape != want.shape or got.dtype != dtype:
        raise ValueError(f"{case.label}: got {got.dtype} {got.shape}, wanted {dtype} {want.shape}")
    if case.size is None or not (is_float(dtype) or dtype.kind == "c"):
        want = want != 0 if dtype == BOOL else want.astype(dtype)
        same = (got == want) | ((got != got) & (want != want))
        return float(np.count_nonzero(~same)), 0.0
    # A sum of n products in precision u differs from the exact sum by at most n*u relative to |A||B|, the sum of the
    # absolute values of the terms, in whatever order it is computed. A reference that is not wider adds the same error
    # again. With u = eps/2 the bound is n*eps. It is three times that for complex (2n terms in each of two components,
    # and 2*sqrt(2) < 3), and one rounding to the result is added.
    per_term = _eps(accumulator_dtype(dtype)) * (3 if dtype.kind == "c" else 1)
    bound = case.terms * per_term + _eps(dtype)
    off = abs(got.astype(want.dtype) - want)
    error = np.divide(off, case.size, out=np.where(off == 0, 0.0, np.inf), where=case.size != 0)
    return float(error.max(initial=0.0)), bound


def _eps(dtype: np.dtype[Any]) -> float:
    return 2.0**-7 if dtype == BFLOAT16 else float(np.finfo(dtype).eps)


# --------------------------------------------------------------------------------- command line
def _homes(device: str | None) -> list[Backend]:
    """The backends to check: the one named, both for "all", or those of this machine; ValueError if one is missing."""
    problem = None if device == "cpu" else cuda_problem()
    if problem is not None and device is not None:
        raise ValueError(f"--device {device}: missing {problem}")
    backends = [] if device == "cuda" else [host()]
    return backends if problem is not None or device == "cpu" else [*backends, cuda()]


def _printer() -> Callable[[str, str], None]:
    """A function that prints a line in a style: colours by rich on a terminal, plain text otherwise."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        return lambda text, style: print(text, flush=True)
    console = Console(soft_wrap=True)
    return lambda text, style: console.print(Text(text, style=style))


def add_command(commands: Any) -> None:
    """Add `verify` to the command line."""
    parser = commands.add_parser(
        "verify", help="check every product, dtype and kernel on this machine against dense NumPy"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "all"), help="default: the CPU, and the GPU if there is one"
    )
    parser.add_argument("--seed", type=int, help="repeat a run; default: a new one")
    parser.set_defaults(command=lambda args: _report(args, parser))


def _report(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        backends = _homes(args.device)
    except ValueError as error:
        parser.error(str(error))
    seed = secrets.randbits(32) if args.seed is None else args.seed
    write = _printer()
    write(f"seed {seed}; kernels that are not in the cache are compiled on first use", "dim")
    write(HEADER, "bold")
    start = time.perf_counter()
    failed = total = 0
    for backend in backends:
        for outcome in run(backend=backend, seed=seed):
            total += 1
            failed += not outcome.ok
            write(str(outcome), "" if outcome.ok else "bold red")
    seconds = time.perf_counter() - start
    where = " and ".join(backend.name for backend in backends)
    summary = f"{total} checks on {where}: {total - failed} ok, {failed} failed (seed {seed}, {seconds:.1f} s)"
    write(summary, "bold red" if failed else "bold green")
    return 1 if failed else 0
