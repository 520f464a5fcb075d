"""A cost model of a matrix over several ranks: bytes over bandwidths, and latencies. Nothing here measures.

``t(A @ x) = call + max(bytes / bandwidth, t(halo)) + bytes of ghost blocks / bandwidth`` where the halo travels beside
the first product, and the sum of both where it does not; ``t(halo) = messages * latency + bytes / link``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Machine:
    """What one rank has, in seconds and bytes a second."""

    #: Bytes of its memory that a product reads in a second.
    bandwidth: float
    #: The fixed cost of a product.
    call: float
    #: The seconds of one message, and of one sum over all ranks.
    latency: float
    reduce: float
    #: Bytes of messages in a second, in one direction.
    link: float
    #: Whether messages travel while a product runs.
    overlap: bool


@dataclass(frozen=True)
class Panel:
    """What one rank multiplies."""

    #: Blocks and their indices, and the vectors that are read and written.
    matrix_bytes: float
    vector_bytes: float
    halo_bytes: float
    messages: int


def halo_seconds(machine: Machine, panel: Panel) -> float:
    """How long the ghosts travel."""
    return panel.messages * machine.latency + panel.halo_bytes / machine.link


def product_seconds(machine: Machine, panel: Panel) -> float:
    """How long ``A @ x`` takes."""
    local, travel = (panel.matrix_bytes + panel.vector_bytes) / machine.bandwidth, halo_seconds(machine, panel)
    return machine.call + (max(local, travel) if machine.overlap else local + travel)


#: How often an iteration of CG reads or writes a vector of its size beside the product: three inner products, three
#: updates, and block Jacobi with a block of 3 x 3 for 3 rows.
_PASSES = 18


def iteration_seconds(machine: Machine, panel: Panel) -> float:
    """How long an iteration of CG with block Jacobi takes: a product, vectors, and three sums over the ranks."""
    vectors = _PASSES * panel.vector_bytes / 2 / machine.bandwidth
    return product_seconds(machine, panel) + vectors + 3 * machine.reduce


# ---------------------------------------------------------------------------------------- on paper
#: Bytes a second of a copy on an H200, which `A @ x` reaches with blocks of 3 x 3 in float64 (spmv_table_cuda.json).
_CARD = 4.25e12
#: name: (bytes a second in one direction, seconds of a message, seconds of a sum over 16 ranks)
LINKS = {
    "NVLink, 8 cards a node": (450e9, 10e-6, 40e-6),
    "InfiniBand at 400 Gb/s, MPI reads the card": (50e9, 15e-6, 60e-6),
    "the same, through pinned memory": (50e9 / 3, 40e-6, 80e-6),
}
#: A grid of 3 x 3 blocks in float64: 27 blocks in a block row, with an index of 4 bytes each.
_ROW_BYTES = 27 * (9 * 8 + 4)


def on_paper(total: float = 1e12, cards: int = 16) -> list[dict[str, Any]]:
    """Predictions for so many bytes of blocks on so many cards: a cubic grid in slabs, each with two neighbours."""
    rows = total / _ROW_BYTES
    plane = rows ** (2 / 3)
    halo = 2 * plane * 3 * 8
    panel = Panel(total / cards, 2 * rows / cards * 3 * 8, halo, 2)
    found = []
    for name, (link, latency, reduce) in LINKS.items():
        machine = Machine(_CARD, 10e-6, latency, reduce, link, True)
        found.append(
            {
                "link": name,
                "cards": cards,
                "bytes": total,
                "halo_bytes": halo,
                "local": (panel.matrix_bytes + panel.vector_bytes) / _CARD,
                "halo": halo_seconds(machine, panel),
                "product": product_seconds(machine, panel),
                "iteration": iteration_seconds(machine, panel),
            }
        )
    return found
