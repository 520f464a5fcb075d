"""All studies: a name, a title, what measures the rows, and their columns."""

from __future__ import annotations

from ..study import Study
from . import arrays, attention, calls, everyday, llama, panels, products, ranks, solvers

_MODULES = (products, attention, calls, everyday, arrays, solvers, llama, ranks, panels)
ALL: dict[str, Study] = {study.name: study for module in _MODULES for study in module.STUDIES}
#: What is measured where nothing is asked for
USUAL = ("products", "vectors", "attention", "decode")
