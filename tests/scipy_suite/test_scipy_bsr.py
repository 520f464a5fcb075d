"""scipy's own BSR tests on our host classes."""

from __future__ import annotations

from bsrgemm.bsr import host_bsr_array, host_bsr_matrix

from .point import SCIPY_CLASSES, point

#: Where we differ from scipy on purpose, with the reason. Strict: a test that passes is reported.
DIFFERS: dict[str, str] = {}

for _class in SCIPY_CLASSES:
    _container = host_bsr_matrix if "Matrix" in _class.__name__ else host_bsr_array
    _name = f"TestOurs{_class.__name__.removeprefix('Test')}"
    globals()[_name] = point(_class, _name, _container, DIFFERS, __name__)
del _class
