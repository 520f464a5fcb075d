"""A cost model of attention over several ranks: operations over rates, bytes over links. Nothing here measures.

A step of the ring takes ``max(operations / rate, t(keys))`` where messages travel beside it, and the sum of both where
they do not; ``t(keys) = latency + bytes / link``. Each step but the first merges its result: bytes over the bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Bytes of a number in the sums, and how often a merge reads or writes a number of the result.
_WIDE, _MERGE_PASSES = 4, 12
#: Operations of the gradients for one of the forward pass: five products beside two.
_BACKWARD = 2.5


@dataclass(frozen=True)
class Machine:
    """What one rank has, in seconds, operations a second and bytes a second."""

    #: Operations of attention in a second, forward and backward.
    rate: float
    backward_rate: float
    #: The fixed cost of a call on all ranks.
    call: float
    bandwidth: float
    latency: float
    #: Bytes of messages in a second, in one direction.
    link: float
    #: Whether messages travel while a step is computed.
    overlap: bool


@dataclass(frozen=True)
class Problem:
    """A sequence on several ranks; `left` is the window before a query, None without one."""

    tokens: int
    heads: int
    kv_heads: int
    dim: int
    itemsize: int
    ranks: int
    causal: bool
    left: int | None = None

    @property
    def pairs(self) -> float:
        """Pairs of query and key that a rank computes, in one head."""
        own = self.tokens / self.ranks
        if self.left is not None:
            return own * min(self.left + 1, self.tokens)
        return own * self.tokens / (2 if self.causal else 1)

    @property
    def steps(self) -> int:
        """Steps in which a rank computes with the keys of another one."""
        return min(self.ranks - 1, 2) if self.left is not None else self.ranks - 1

    @property
    def merged(self) -> float:
        """Queries of a rank that see the keys of another one in a step."""
        own = self.tokens / self.ranks
        return own if self.left is None else min(own, self.left)

    @property
    def step_bytes(self) -> float:
        """The most bytes of keys and values that a rank sends in a step."""
        return self.merged * self.kv_heads * 2 * self.dim * self.itemsize


def merge_bytes(tokens: float, heads: int, dim: int) -> float:
    """Bytes that a merge reads and writes for the queries of a rank."""
    return tokens * heads * dim * _WIDE * _MERGE_PASSES


def forward_seconds(machine: Machine, problem: Problem) -> dict[str, float]:
    """How long the forward pass takes, with the operations, the messages and the merges that it consists of."""
    return _seconds(machine, problem, 1.0, machine.rate, 1)


def backward_seconds(machine: Machine, problem: Problem) -> dict[str, float]:
    """How long the gradients take; keys travel again, and their gradients travel back."""
    return _seconds(machine, problem, _BACKWARD, machine.backward_rate, 2)


def _seconds(machine: Machine, problem: Problem, work: float, rate: float, messages: int) -> dict[str, float]:
    compute = 4 * work * problem.heads * problem.dim * problem.pairs / rate
    travel = messages * (machine.latency + problem.step_bytes / machine.link)
    merged = merge_bytes(problem.merged, problem.heads, problem.dim) / machine.bandwidth
    if work > 1:  # gradients are added up, which takes a third of a merge
        merged /= 3
    each = compute / (problem.steps + 1)
    shown = max(0.0, travel - each) if machine.overlap else travel
    total = machine.call + compute + problem.steps * (shown + merged)
    return {"total": total, "compute": compute, "travel": travel, "step": each, "merge": problem.steps * merged}


# ---------------------------------------------------------------------------------------- on paper
#: Operations a second of causal attention with 128 columns on an H200, and of its gradients; bytes a second of a copy.
_RATE, _BACKWARD_RATE, _CARD = 700e12, 550e12, 4.25e12
#: name: (bytes a second in one direction, seconds of a message)
LINKS = {
    "NVLink": (450e9, 10e-6),
    "InfiniBand at 400 Gb/s, MPI reads the card": (50e9, 15e-6),
    "the same, through pinned memory": (50e9 / 3, 40e-6),
}


def on_paper(tokens: int = 1 << 20, cards: int = 8) -> list[dict[str, Any]]:
    """Predictions for so many tokens on so many cards: 64 heads of queries and 8 of keys, 128 columns, bfloat16."""
    found = []
    for left in (None, 4096):
        problem = Problem(tokens, 64, 8, 128, 2, cards, True, left)
        for name, (link, latency) in LINKS.items():
            machine = Machine(_RATE, _BACKWARD_RATE, 200e-6, _CARD, latency, link, True)
            forward, backward = forward_seconds(machine, problem), backward_seconds(machine, problem)
            found.append(
                {
                    "tokens": tokens,
                    "cards": cards,
                    "left": left,
                    "link": name,
                    "step_bytes": problem.step_bytes,
                    "step": forward["step"],
                    "travel": forward["travel"],
                    "forward": forward["total"],
                    "backward": backward["total"],
                    "alone": 4 * 64 * 128 * problem.pairs * cards / _RATE,
                }
            )
    return found
