"""Point scipy's own BSR test classes at another BSR class.

Where we differ from scipy on purpose, a test names the statements that fail (`Difference`). All its other statements
are run and must pass.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from scipy.sparse import _data
from scipy.sparse.tests import test_base as tb

import bsrgemm as bg

from ..conftest import LONG

SCIPY_CLASSES = (tb.TestBSR, tb.TestBSRMatrix, tb.TestBSRNonCanonical, tb.TestBSRNonCanonicalMatrix)

#: One dtype of each kind, narrow and wide: what classes that share their code with others are tested with, unless the
#: long profile runs. scipy's tests go through pairs of dtypes.
FEW_DTYPES = None if LONG else frozenset(map(np.dtype, ("bool", "int8", "uint64", "float32", "float64", "complex128")))

# Two of scipy's min/max tests do nothing for a class that is not scipy's own mixin.
_data._minmax_mixin = (_data._minmax_mixin, bg.bsr_array, bg.bsr_matrix)


@dataclass(frozen=True)
class Difference:
    """Why a test of scipy does not hold here, and which of its statements do not: a part of the text of each."""

    reason: str
    statements: tuple[str, ...]


@contextmanager
def narrowed(dtypes: frozenset[np.dtype[Any]] | None) -> Iterator[None]:
    """scipy's test module with these of its dtypes; all of them for None."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            tb, "supported_dtypes", [d for d in tb.supported_dtypes if dtypes is None or np.dtype(d) in dtypes]
        )
        yield


def point(
    test_class: type,
    name: str,
    container: Any,
    differs: Mapping[str, Difference],
    module: str,
    dtypes: frozenset[np.dtype[Any]] | None = None,
) -> type:
    """A copy of one of scipy's test classes that builds `container`, and is run with `dtypes` or with all.

    The generic tests build with `spcreator`, the BSR tests with `bsr_container`. The class of the non-canonical
    tests has a *method* `spcreator` that calls ``super().spcreator``, so ours goes into a parent of its own.
    In the tests that `differs` lists, the statements named there must fail and all others pass. Tests that scipy
    marks xfail lose the mark, and those it replaces by an empty one because they are broken there (diagonal, expm of
    non-canonical BSR) run.
    """
    hooks = {"spcreator": container, "bsr_container": container}
    if "NonCanonical" in test_class.__name__:
        base = tb.TestBSRMatrix if "Matrix" in test_class.__name__ else tb.TestBSR
        parent = type(f"_{name}", (base,), {**hooks, "__test__": False})
        own = {k: v for k, v in tb.TestBSRNonCanonical.__dict__.items() if not k.startswith(("__", "test_"))}
        cls = type(
            name, (tb._NonCanonicalCompressedMixin, parent), {**own, "bsr_container": container, "__test__": True}
        )
        owner = parent  # the shared matrices stay canonical, as scipy has them
    else:
        owner = cls = type(name, (test_class,), hooks)
    with narrowed(dtypes):  # a shared matrix for each dtype
        owner.init_class()
    cls.dtypes = dtypes
    cls.__module__ = module
    for test in dir(cls):
        function = getattr(cls, test)
        if not test.startswith("test") or not callable(function):
            continue
        marks = [m for m in getattr(function, "pytestmark", []) if m.name != "xfail"]
        if test in differs:
            function = _differing(function, differs[test])
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


# ---------------------------------------------------------------------------------- differences
def _differing(function: Any, difference: Difference) -> Callable[[Any], None]:
    """`function`, each of whose statements is run, and of which exactly those named in `difference` fail."""
    apart = _apart(function)

    @functools.wraps(function)
    def test(self: Any) -> None:
        failed: dict[str, BaseException] = {}

        @contextmanager
        def tried(statement: str) -> Iterator[None]:
            try:
                yield
            except pytest.skip.Exception:
                pass  # a part that scipy skips; the parts after it run here
            except (Exception, pytest.fail.Exception) as error:
                failed[statement] = error

        apart(self, _tried=tried)
        for statement, error in failed.items():
            if not any(part in statement for part in difference.statements):
                raise AssertionError(f"scipy's test fails here without a reason given: {statement}") from error
        for part in difference.statements:
            assert any(part in statement for statement in failed), f"{part} holds here, unlike: {difference.reason}"

    return test


class _Apart(ast.NodeTransformer):
    """Puts each statement that checks or calls something under ``with _tried(its text):``."""

    def visit_Assert(self, node: ast.stmt) -> ast.stmt:
        tried = ast.Call(ast.Name("_tried", ast.Load()), [ast.Constant(ast.unparse(node))], [])
        return ast.With([ast.withitem(tried)], [node])

    visit_Expr = visit_With = visit_Assert


def _apart(function: Any) -> Any:
    """The same function with each statement apart, in the same module: what is patched there is patched for it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    definition.args.kwonlyargs.append(ast.arg("_tried"))
    definition.args.kw_defaults.append(None)
    made: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(_Apart().visit(tree)), inspect.getfile(function), "exec"), made)
    return types.FunctionType(made[definition.name].__code__, function.__globals__)
