"""A small error that can be put into a source, and where."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Site:
    """Replace the text from `start` to `end` of a file by `new`; offsets count characters."""

    file: str
    rule: str
    start: int
    end: int
    new: str
    #: lines of the statement that is changed, from 1
    first_line: int
    last_line: int

    def applied(self, text: str) -> str:
        """The file with the error."""
        return text[: self.start] + self.new + text[self.end :]

    def old(self, text: str) -> str:
        """What is replaced."""
        return text[self.start : self.end]

    def line(self, text: str) -> str:
        """The line in which the replaced text begins, without indentation."""
        return text[text.rfind("\n", 0, self.start) + 1 :].split("\n", 1)[0].strip()

    def changed_line(self, text: str) -> str:
        """The same line with the error."""
        return self.line(self.applied(text))
