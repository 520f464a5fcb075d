"""Errors of the gradients of attention against float64, on plain inputs and on hard ones, beside those of peers.

The largest error of one draw is a matter of luck: it is the mean over several draws that is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..show.bounds import MOST_ERROR
from ..table import Table
from ..timing import Call
from .attention_backward_cases import PEERS, Case, Operands, ours
from .attention_studies import HARD, hard_inputs

#: (heads, length, columns)
_SHAPE = (2, 2048, 128)
#: The gradient of something that has none is noise: it is left out below this share of the largest gradient of all.
_NOISE = 1e-6
_NAMES = ("dq", "dk", "dv")
#: Peers whose results are (batch, length, heads, columns)
_LENGTH_FIRST = ("FA4", "FA4, deterministic")


def case_of(dtype: str, causal: bool) -> Case:
    """The problem that is asked for its errors."""
    heads, length, columns = _SHAPE
    return Case("accuracy", 1, heads, heads, length, columns, dtype, causal=causal)


def hard_operands(case: Case, kind: str, xp: Any) -> Operands:
    """New inputs whose scores do what `kind` says, and what our attention returns for them."""
    import bsrgemm as bg

    shape = (case.batch, case.heads, case.length, case.columns)
    q, k, v = hard_inputs(xp, kind, shape, case.dtype)
    _, _, dout = hard_inputs(xp, "plain", shape, case.dtype)
    options: dict[str, Any] = {"causal": case.causal}
    out, lse = bg.attention(q, k, v, return_lse=True, **options)
    return Operands(q, k, v, dout, out, lse, options)


def exact(x: Operands) -> list[Any]:
    """dq, dk and dv in float64, with all scores of a head at a time, from q, k, v and dO alone."""
    import bsrgemm as bg

    xp, scale = bg.get_array_module(x.q), x.q.shape[3] ** -0.5
    found = [xp.empty(x.q.shape) for _ in _NAMES]
    for head in range(x.q.shape[1]):
        q, k, v, dout = (y[0, head].astype(np.float32).astype(np.float64) for y in (x.q, x.k, x.v, x.dout))
        scores = scale * (q @ k.T)
        if x.options["causal"]:
            scores = xp.where(xp.tri(len(q), dtype=bool), scores, -np.inf)
        p = xp.exp(scores - scores.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        dp = dout @ v.T
        ds = p * (dp - (p * dp).sum(axis=1, keepdims=True))
        for result, part in zip(found, (scale * ds @ k, scale * ds.T @ q, p.T @ dout), strict=True):
            result[0, head] = part
    return found


def errors(got: Sequence[Any], want: Sequence[Any]) -> dict[str, float]:
    """The largest error of each gradient over its largest value; a gradient that is only noise is left out."""
    largest = [float(abs(y).max()) for y in want]
    found = {}
    for name, x, y, size in zip(_NAMES, got, want, largest, strict=True):
        if size > _NOISE * max(largest):
            found[name] = float(abs(x.astype(np.float32).astype(np.float64) - y).max()) / size
    return found


def _arrays(name: str, results: Sequence[Any]) -> list[Any]:
    from ..peers.attention import as_array

    return [as_array(x.transpose(1, 2).contiguous() if name in _LENGTH_FIRST else x) for x in results[:3]]


def calls_of(x: Operands, case: Case) -> dict[str, Call]:
    """Our gradients in both orders, and those of the peers that are installed and serve the case."""
    calls: dict[str, Call] = {"bsrgemm": ours(x), "bsrgemm, any order": ours(x, False)}
    for name, make in PEERS.items():
        try:
            calls[name] = make(x, case)
        except Exception:
            continue
    return calls


def measure(table: Table, kind: str, case: Case, draws: int) -> None:
    """Add the row of a kind of inputs: mean over the draws of the largest errors of dq, dk and dv."""
    import cupy

    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(draws):
        x = hard_operands(case, kind, cupy)
        want = exact(x)
        for name, call in calls_of(x, case).items():
            for gradient, error in errors(_arrays(name, call()), want).items():
                found.setdefault(name, {}).setdefault(gradient, []).append(error)
    mean = {name: {g: float(np.mean(e)) for g, e in each.items()} for name, each in found.items()}
    others = [each for name, each in mean.items() if not name.startswith("bsrgemm")]
    ratios = {}
    for gradient, error in mean["bsrgemm"].items():
        if best := min((each[gradient] for each in others if gradient in each), default=0.0):
            ratios[gradient] = error / best
    reached = all(ratio <= MOST_ERROR for ratio in ratios.values()) if ratios else None
    text = ", ".join(f"{gradient} {error:.1e}" for gradient, error in mean["bsrgemm"].items())
    shown = ", ".join(f"{gradient} {ratio:.2f}" for gradient, ratio in ratios.items())
    table.add(f"{kind:14} {case.dtype:8} {'causal' if case.causal else 'full':6} | {text} | of the best peer {shown}",
              inputs=kind, dtype=case.dtype, causal=case.causal, draws=draws, errors=mean, ratios=ratios,
              reached=reached)  # fmt: skip


def run(table: Table, quick: bool) -> None:
    """All kinds of inputs in both 16-bit dtypes, full and causal."""
    for dtype in ("float16", "bfloat16"):
        for causal in (False, True):
            for kind in HARD:
                measure(table, kind, case_of(dtype, causal), 2 if quick else 8)
