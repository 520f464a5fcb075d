"""The base class of all kernels: a frozen dataclass whose fields are the macros with which its source is compiled.

A field `tile_n` is the macro ``TILE_N``. A field of `Types` is the macros of the types that the source names. A field
that is declared by `host` decides something on the host alone. What follows from the fields is a property, whose name
is in `derived` if it is a macro too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import MISSING, field, fields
from enum import Enum
from functools import lru_cache
from typing import Any, ClassVar, Self

from .card import Card, reaches
from .element_types import Types
from .jit import KernelSpec
from .structs import Struct

#: The macros of the fields of `Types`.
_TYPE_MACROS = {"a": "ELEMENT_A", "b": "ELEMENT_B", "c": "ELEMENT_C", "acc": "ACCUMULATOR", "index": "INDEX"}


def host(default: Any = MISSING) -> Any:
    """Declare a field of a kernel that is no macro."""
    return field(default=default, metadata={"host": True})


class Kernel:
    """A kernel with its constants: what it serves, which constants are best, what it takes, and how it is launched.

    Subclasses are dataclasses with ``frozen=True``. Class arguments: `source`, a file of the folder cuda; `entry`, by
    default its stem; `argument`, the `Struct` that it takes, several of them, or a function that returns the struct
    for the name of the accumulator; `needs`, the oldest architecture, or the only one if it ends in a letter; `types`,
    which of `Types` the source names; `derived`, properties that are macros too.
    """

    source: ClassVar[str] = ""
    entry: Any = ""
    #: the name of the class that `force_kernel` has selected, such as "GemmSm80"; None lets the rules choose
    forced: ClassVar[str | None] = None
    needs: ClassVar[str] = "sm_75"
    derived: ClassVar[tuple[str, ...]] = ()
    argument: ClassVar[Any] = ()
    types_named: ClassVar[tuple[str, ...]] = tuple(_TYPE_MACROS)

    # No values here for what subclasses may have as fields: a dataclass takes them for the defaults of these fields.
    threads: Any
    shared_bytes: Any
    #: whether a launch may begin before the kernels in front of it have ended
    overlaps: Any = False
    #: whether it is needed so rarely that it is not compiled ahead of time, unless all are asked for
    rare: Any = False

    def __init_subclass__(
        cls,
        source: str | None = None,
        argument: Struct | tuple[Struct, ...] | Callable[[str], Any] | None = None,
        needs: str | None = None,
        types: str | None = None,
        derived: str | None = None,
        entry: str | None = None,
    ) -> None:
        if source is not None:
            cls.source = source
            if "entry" not in vars(cls):  # otherwise it is a field
                cls.entry = entry or source.removesuffix(".cu")
        if argument is not None:
            cls.argument = staticmethod(argument) if callable(argument) else argument
        if needs is not None:
            cls.needs = needs
        if types is not None:
            cls.types_named = tuple(types.split())
        if derived is not None:
            cls.derived = tuple(derived.split())

    # ---------------------------------------------------------------------- what a family of kernels says of itself
    @classmethod
    def serves(cls, problem: Any) -> bool:
        """Whether this kernel can compute the problem: exactly, and within its limits. Speed does not count."""
        raise NotImplementedError(f"{cls.__name__} is not chosen by a problem")

    @classmethod
    def best(cls, problem: Any) -> Self:
        """The constants for a problem that it serves."""
        raise NotImplementedError(f"{cls.__name__} is not chosen by a problem")

    @classmethod
    def variants(cls, problem: Any) -> Iterator[Self]:
        """The constants that `tune` and `force_kernel` try for a problem that it serves, the best first."""
        yield cls.best(problem)

    @classmethod
    def every(cls, dtypes: Any) -> Iterator[Self]:
        """All constants that can be asked for with operands of these dtypes."""
        raise NotImplementedError(cls.__name__)

    def seconds(self, problem: Any, card: Card) -> float:
        """What a launch will take, predicted from bytes, operations and launches."""
        raise NotImplementedError(f"{type(self).__name__} is not chosen by a problem")

    def prepare(self, call: Any, card: Card) -> Any:
        """The launch for a kind of call: lists, grid, tensor maps, argument."""
        raise NotImplementedError(f"{type(self).__name__} is launched with other kernels")

    # ------------------------------------------------------------------------------------------- what is compiled
    @property
    def acc(self) -> str:
        """The name of the type in which sums are made."""
        return self.types.acc  # type: ignore[attr-defined]

    @property
    def structs(self) -> tuple[Struct, ...]:
        """The structs that the kernel takes."""
        taken = self.argument(self.acc) if callable(self.argument) else self.argument
        return (taken,) if isinstance(taken, Struct) else taken

    def macros(self) -> Iterator[tuple[str, str | int]]:
        """The definitions with which the source is compiled."""
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if isinstance(value, Types):
                yield from ((_TYPE_MACROS[name], getattr(value, name)) for name in self.types_named)
            elif not each.metadata.get("host"):
                yield each.name.upper(), _literal(value)
        yield from ((name.upper(), _literal(getattr(self, name))) for name in self.derived)

    def spec(self) -> KernelSpec:
        """What is compiled: the same for kernels that differ on the host alone."""
        return _spec(self)

    def runs_on(self, arch: str) -> bool:
        """Whether it can be compiled for `arch`, such as "sm_90a", and be launched there."""
        return reaches(arch, self.needs)


# The first call with each new matrix asks again for a kernel that is known.
@lru_cache(maxsize=1024)
def _spec(kernel: Kernel) -> KernelSpec:
    return KernelSpec(kernel.source, kernel.entry, tuple(kernel.macros()), kernel.structs, bool(kernel.overlaps))


def _literal(value: Any) -> str | int:
    if isinstance(value, Enum):
        return list(type(value)).index(value)
    return int(value) if isinstance(value, int) else str(value)


@contextlib.contextmanager
def force_kernel(name: str) -> Iterator[None]:
    """Within this context, products and attention use the kernel of this class ("GemmSm80", ...) or raise ValueError.

    It is for tests and benchmarks.
    """
    before, Kernel.forced = Kernel.forced, name
    try:
        yield
    finally:
        Kernel.forced = before
