"""A study is a table: what measures its rows, and its columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .cases.case import Case
from .measure import Row, Run
from .place import Place
from .report import USUAL, Columns

Cases = Callable[[Place], Sequence[Case]]


@dataclass(frozen=True)
class Sizes:
    """Sizes from the command line that replace the usual ones; an empty field leaves the usual ones."""

    size: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    density: tuple[float, ...] = ()
    dtype: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any((self.size, self.block, self.columns, self.density, self.dtype))


@dataclass(frozen=True)
class Study:
    """One table."""

    name: str
    title: str
    rows: Callable[[Run], Iterable[Row]]
    columns: Columns = USUAL
    #: where it can be measured
    devices: tuple[str, ...] = ("cuda", "cpu")
    #: of studies that have them: what their rows measure
    cases: Cases | None = None
    #: the same for sizes from the command line
    sized: Callable[[Place, Sizes], Sequence[Case]] | None = None

    @property
    def about(self) -> str:
        """A line of the list of studies."""
        where = "" if len(self.devices) > 1 else ", on a GPU" if self.devices == ("cuda",) else ", on the CPU"
        return f"{self.name:24} {self.title}{where}"


def of_cases(name: str, title: str, cases: Cases, columns: Columns = USUAL, peak: bool = False, **more: Any) -> Study:
    """The study of some cases, each checked and timed beside its peers."""

    def rows(run: Run) -> Iterable[Row]:
        return run.rows(cases(run.place), peak)

    return Study(name, title, rows, columns, cases=cases, **more)


def resized(study: Study, sizes: Sizes) -> Study:
    """The study with sizes from the command line; ValueError where it has none."""
    if study.sized is None:
        raise ValueError(f"{study.name}: --size, --block, --columns, --density and --dtype change other studies")
    sized = study.sized

    def cases(place: Place) -> Sequence[Case]:
        found = sized(place, sizes)
        if not found:
            raise ValueError(f"nothing to measure: there is no {', '.join(sizes.dtype)} on {place.device}")
        return found

    return of_cases(study.name, study.title, cases, study.columns)
