"""Point scipy's own BSR test classes at another BSR class."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
from scipy.sparse import _data
from scipy.sparse.tests import test_base as tb

import bsrgemm as bg

SCIPY_CLASSES = (tb.TestBSR, tb.TestBSRMatrix, tb.TestBSRNonCanonical, tb.TestBSRNonCanonicalMatrix)

# Two of scipy's min/max tests do nothing for a class that is not scipy's own mixin.
_data._minmax_mixin = (_data._minmax_mixin, bg.bsr_array, bg.bsr_matrix)


def point(test_class: type, name: str, container: Any, differs: Mapping[str, str], module: str) -> type:
    """A copy of one of scipy's test classes that builds `container`.

    The generic tests build with `spcreator`, the BSR tests with `bsr_container`. The class of the non-canonical
    tests has a *method* `spcreator` that calls ``super().spcreator``, so ours goes into a parent of its own.
    Tests in `differs` (name -> reason) are strict xfails. Tests that scipy marks xfail lose the mark, and those it
    replaces by an empty one because they are broken there (diagonal, expm of non-canonical BSR) run.
    """
    hooks = {"spcreator": container, "bsr_container": container}
    if "NonCanonical" in test_class.__name__:
        base = tb.TestBSRMatrix if "Matrix" in test_class.__name__ else tb.TestBSR
        parent = type(f"_{name}", (base,), {**hooks, "__test__": False})
        own = {k: v for k, v in tb.TestBSRNonCanonical.__dict__.items() if not k.startswith(("__", "test_"))}
        cls = type(
            name, (tb._NonCanonicalCompressedMixin, parent), {**own, "bsr_container": container, "__test__": True}
        )
        parent.init_class()  # the shared matrices stay canonical, as scipy has them
    else:
        cls = type(name, (test_class,), hooks)
        cls.init_class()
    cls.__module__ = module
    for test in dir(cls):
        function = getattr(cls, test)
        if not test.startswith("test") or not callable(function):
            continue
        marks = [m for m in getattr(function, "pytestmark", []) if m.name != "xfail"]
        if test in differs:
            marks.append(pytest.mark.xfail(reason=differs[test], strict=True).mark)
        elif len(marks) == len(getattr(function, "pytestmark", [])):
            continue
        setattr(cls, test, _marked(function, marks))
    return cls


def _marked(function: Any, marks: list[Any]) -> Any:
    @functools.wraps(function)
    def test(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    test.pytestmark = marks  # type: ignore[attr-defined]
    return test
