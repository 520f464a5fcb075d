"""scipy's own BSR tests on our host classes."""

from __future__ import annotations

import scipy

from bsrgemm.bsr import host_bsr_array, host_bsr_matrix

from .point import SCIPY_CLASSES, point

#: Where we differ from scipy on purpose, with the reason. Strict: a test that passes is reported.
DIFFERS = {"test_dtype_check": "scipy refuses float16, we hold it"}
if scipy.__version__ < "1.18":
    DIFFERS["test_count_nonzero"] = "count_nonzero(axis) raises in scipy 1.17; it works here, as in scipy 1.18"
NONCANONICAL_DIFFERS = {
    "test_argmax": "argmax(explicit=True) is a flat index into the matrix here, into the stored values in scipy",
}

for _class in SCIPY_CLASSES:
    _container = host_bsr_matrix if "Matrix" in _class.__name__ else host_bsr_array
    _name = f"TestOurs{_class.__name__.removeprefix('Test')}"
    _differs = DIFFERS | (NONCANONICAL_DIFFERS if "NonCanonical" in _name else {})
    globals()[_name] = point(_class, _name, _container, _differs, __name__)
del _class
