"""One fake CuPy: public calls run on it without a card, with the real kernels executed by the emulator.

`installed(Card("sm_90a"))` puts modules `cupy` and `cupyx` where the library has imported the real ones. Their arrays
are memory of the host in which every allocation lies beside a guard page, and refuse implicit conversion to NumPy.
A launched kernel is emulated at once, or noted, or neither (`Policy`); in a capture it becomes a step of the graph, as
all other work of arrays does. Freed memory is overwritten and handed to the next who asks, so that a graph that
outlives its operands computes something wrong.

`memory` has the pools, `arrays` the array, `streams` streams and graphs, `card` the card and its launches, `modules`
what `cupy` offers, and `install` puts it in place. Tests ask for the fixture `device`.
"""

from __future__ import annotations

from .card import Card, Launched, Policy
from .install import installed, renumbered
from .memory import Bystanders
from .modules import NotThere
from .streams import CUDARuntimeError

__all__ = ["Bystanders", "CUDARuntimeError", "Card", "Launched", "NotThere", "Policy", "installed", "renumbered"]
