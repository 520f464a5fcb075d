"""One fake CuPy: public calls run on it without a card, with the real kernels executed by the emulator.

`installed(Card("sm_90a"))` puts modules `cupy` and `cupyx` where the library has imported the real ones. Their arrays
are memory of the host in which every allocation lies beside a guard page, and refuse implicit conversion to NumPy.
A launched kernel is emulated at once, or noted, or neither (`Policy`); in a capture it becomes a step of the graph, as
all other work of arrays does. Freed memory is overwritten and handed to the next who asks, so that a graph that
outlives its operands computes something wrong.

`memory` has the pools, `arrays` and `operators` the array, `functions` what the package may call, `sparse` the
formats of cupyx, `streams` streams and graphs, `card` the card and its launches, `modules` all that `cupy` offers, and
`install` puts it in place. Tests of kernels ask for the fixture `device`; others have the mark `fake`, for a card on
which they take the library's backend of GPUs as it is.
"""

from __future__ import annotations

from .arrays import ndarray, untouched, xp
from .card import Card, Launched, Policy
from .install import backend, in_place, installed, renumbered
from .memory import Bystanders
from .modules import NotThere
from .streams import CUDARuntimeError, waits

__all__ = [
    "Bystanders",
    "CUDARuntimeError",
    "Card",
    "Launched",
    "NotThere",
    "Policy",
    "backend",
    "in_place",
    "installed",
    "ndarray",
    "renumbered",
    "untouched",
    "waits",
    "xp",
]
