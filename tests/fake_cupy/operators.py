"""The operators of the array of the fake CuPy, and what a captured graph repeats of its work."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from . import memory, streams
from .arrays import _compute, _garbage, _operand, ndarray, place, xp
from .memory import room_of, unowned


def _comparison(ufunc: str) -> Callable[[Any, Any], Any]:
    """Alone among the operators it takes a 0-d NumPy array as the other operand."""
    compare = _binary(ufunc, swapped=False)

    def method(self: ndarray, other: Any) -> Any:
        return compare(self, other[()] if isinstance(other, np.ndarray) and not other.ndim else other)

    return method


def _binary(ufunc: str, swapped: bool) -> Callable[[Any, Any], Any]:
    def method(self: ndarray, other: Any) -> Any:
        if getattr(other, "__array_priority__", 0) > self.__array_priority__:
            return NotImplemented
        function = getattr(xp, ufunc)
        return function(other, self) if swapped else function(self, other)

    return method


def _inplace(ufunc: str) -> Callable[[Any, Any], Any]:
    def method(self: ndarray, other: Any) -> Any:
        _compute(getattr(np, ufunc), self._memory, _operand(other), out=self._memory)
        return self

    return method


_OPERATORS = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "true_divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "power",
    "matmul": "matmul",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "left_shift",
    "rshift": "right_shift",
}
for _name, _ufunc in _OPERATORS.items():
    setattr(ndarray, f"__{_name}__", _binary(_ufunc, swapped=False))
    setattr(ndarray, f"__r{_name}__", _binary(_ufunc, swapped=True))
    setattr(ndarray, f"__i{_name}__", _inplace(_ufunc))
for _name, _ufunc in {
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
}.items():
    setattr(ndarray, f"__{_name}__", _comparison(_ufunc))
for _name, _ufunc in {"neg": "negative", "abs": "absolute", "invert": "invert"}.items():
    setattr(ndarray, f"__{_name}__", (lambda ufunc: lambda self: getattr(xp, ufunc)(self))(_ufunc))


# ------------------------------------------------------------------------------------- work of a captured graph
def _arrays(x: Any) -> Iterator[Any]:
    if isinstance(x, ndarray):
        yield x
    elif isinstance(x, tuple | list):
        for part in x:
            yield from _arrays(part)


def _repeated(x: Any) -> Any:
    """An argument as a graph keeps it: where an array lies, not the array."""
    if isinstance(x, ndarray):
        found = object.__new__(ndarray)
        found._memory = unowned(x._memory)
        return found
    if isinstance(x, tuple | list):
        return type(x)(map(_repeated, x))
    return x


def recorded(function: Callable[..., Any], writes: bool = False) -> Callable[..., Any]:
    """A function of arrays that does its work at once, or each time when the graph runs that is being captured.

    In a capture it is called once to see what it returns; then its operands are as they were, and its result is not
    set. `writes`: it changes an operand.
    """

    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        steps = streams.captured_steps()
        if steps is None:
            return function(*args, **kwargs)
        operands = list(_arrays((*args, *kwargs.values())))
        before = [x._memory.copy() for x in operands]
        with streams.at_once():
            result = function(*args, **kwargs)
        for x, old in zip(operands, before, strict=True):
            if x._memory.flags.writeable:
                x._memory[...] = old
        made = list(_arrays(result))
        fresh = [x for x in made if not any(room_of(x._memory) is room_of(y._memory) for y in operands)]
        if fresh or writes or kwargs.get("out") is not None or len(args) > getattr(function, "nin", len(args)):
            again = [_repeated(x) for x in args], {name: _repeated(x) for name, x in kwargs.items()}
            targets = [unowned(x._memory) for x in fresh]
            places = [k for k, x in enumerate(made) if any(x is y for y in fresh)]

            def step() -> None:
                with memory.using_allocator(place.heap.of_replays):  # not where the graph has its own arrays
                    found = list(_arrays(function(*again[0], **again[1])))
                for k, target in zip(places, targets, strict=True):
                    target[...] = found[k]._memory

            steps.append(step)
            for x in fresh:
                x._memory[...] = _garbage(x.dtype)
        return result

    return method


#: Methods that change the array, and methods that return another one; both are steps of a graph.
_WRITING = (
    *("__setitem__", "fill", "put", "sort", "partition", "scatter_add", "set"),
    *(f"__i{name}__" for name in _OPERATORS),
)
_MAKING = (
    *("__getitem__", "astype", "copy", "flatten", "ravel", "reshape", "conj", "conjugate", "diagonal", "dot"),
    *("real", "imag"),
)
for _name in _WRITING:
    if hasattr(ndarray, _name):
        setattr(ndarray, _name, recorded(getattr(ndarray, _name), writes=True))
for _name in _MAKING:
    _found = getattr(ndarray, _name)
    if isinstance(_found, property):
        continue  # views
    setattr(ndarray, _name, recorded(_found))
