"""scipy's own BSR tests on our host classes."""

from __future__ import annotations

import scipy

from bsrgemm.bsr import host_bsr_array, host_bsr_matrix

from .point import FEW_DTYPES, SCIPY_CLASSES, Difference, point

#: Where we differ from scipy on purpose.
DIFFERS = {
    "test_dtype_check": Difference("scipy refuses float16, we hold it", ("self.spcreator(a)", "dtype=np.float16"))
}
if scipy.__version__ < "1.18":
    DIFFERS["test_count_nonzero"] = Difference(
        "count_nonzero(axis) raises in scipy 1.17; it works here, as in scipy 1.18",
        ("assert_raises(NotImplementedError",),
    )
NONCANONICAL_DIFFERS = {
    "test_argmax": Difference(
        "argmax(explicit=True) is a flat index into the matrix here, into the stored values in scipy",
        ("argmin(axis=None, explicit=True), 0", "argmax(axis=None, explicit=True), 0"),
    ),
}

for _class in SCIPY_CLASSES:
    _container = host_bsr_matrix if "Matrix" in _class.__name__ else host_bsr_array
    _name = f"TestOurs{_class.__name__.removeprefix('Test')}"
    _differs = DIFFERS | (NONCANONICAL_DIFFERS if "NonCanonical" in _name else {})
    _dtypes = FEW_DTYPES if "Matrix" in _name else None  # a matrix differs from an array in its operators
    globals()[_name] = point(_class, _name, _container, _differs, __name__, _dtypes)
del _class
