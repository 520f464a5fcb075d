"""Rows of cases: each is checked, then timed in turn with its peers. A row says what is missing, and why."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from .cases.case import Case, Ready
from .place import Call, Place, quartiles

Row = dict[str, Any]
#: The number of problems whose kernels are compiled at the same time; NVRTC uses one core for each
_SIDE_BY_SIDE = 8


def reason_of(error: BaseException) -> str:
    """One line of an error."""
    text = str(error).strip().split("\n")[0][:160]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@dataclass
class Run:
    """Where is measured, with whom, and what is said meanwhile."""

    place: Place
    with_peers: bool = True
    #: shows a line of progress
    say: Callable[[str], None] = lambda text: None
    #: peers that are not installed, in the order in which they were asked
    absent: dict[str, None] = field(default_factory=dict)

    def compile(self, cases: Sequence[Case]) -> None:
        """Call each case once on zeros, side by side, so that kernels are compiled before anything is timed."""
        place = self.place.blank()
        if not place.on_gpu or not cases:
            return
        largest = max(case.memory for case in cases)
        together = int(max(1, min(_SIDE_BY_SIDE, place.free_bytes() // (2 * largest))))

        def once(case: Case) -> None:
            try:  # an error here occurs again in the measurement, which reports it
                if case.memory <= place.free_bytes():
                    case.ready(place).call()
            except Exception as error:
                self.say(f"{case}: {reason_of(error)}")

        self.say("compiling")
        with ThreadPoolExecutor(together) as pool:
            list(pool.map(once, cases))
        place.synchronize()
        place.release()

    def rows(self, cases: Sequence[Case], peak: bool = False) -> Iterator[Row]:
        """A row for each case; `peak` also finds the memory that a call takes."""
        self.compile(cases)
        for number, case in enumerate(cases, 1):
            self.say(f"{number} of {len(cases)}: {case}")
            yield self.row(case, peak)

    def row(self, case: Case, peak: bool = False) -> Row:
        """Measure one case; an error is a part of the row."""
        sizes = {name: value for name, value in asdict(case).items() if value not in (None, False)}  # type: ignore[call-overload]
        row: Row = {"what": str(case), **sizes, "flops": case.flops, "moved": case.moved, "peers": {}}
        needed, free = case.memory, self.place.free_bytes()
        if needed > free:
            return row | {"failed": f"needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"}
        try:
            self._fill(row, case, peak)
        except Exception as error:
            row["failed"] = reason_of(error)
        finally:
            gc.collect()
            self.place.release()
        return row

    def _fill(self, row: Row, case: Case, peak: bool) -> None:
        ready = case.ready(self.place)
        if peak:
            row["peak_bytes"] = self.place.peak_bytes(ready.call)
        row["error"] = ready.error(ready.call())
        if not row["error"] <= 1:
            row["wrong"] = True
            return
        peers = self._peer_calls(row, ready)
        self.timed(row, ready.call, peers)
        least = self.place.least_seconds(case.kind, case.flops, case.moved)
        row["roof"] = None if least is None else least / row["seconds"]
        if self.place.on_gpu and not self.place.quick and getattr(case, "back_to_back", False):
            row["sustained"] = self.place.sustained(ready.call)
            for name, call in peers.items():
                if name in row["peers"]:
                    row["peers"][name]["sustained"] = self.place.sustained(call)

    def timed(self, row: Row, call: Call, peers: dict[str, Call]) -> None:
        """Put the times of a call and of its peers, taken in turn, into a row."""

        def failed(name: str, error: Exception) -> None:
            if not name:
                raise error
            row["peers"][name] = {"failed": reason_of(error)}

        rounds = self.place.rounds({"": call} | peers, failed)
        row |= quartiles([x for found in rounds for x in found[""]])
        for name in rounds[0]:
            if name:
                # of each round by itself: what slows a machine down slows all of a round down
                ratio = median(median(found[name]) / median(found[""]) for found in rounds)
                row["peers"][name] = quartiles([x for found in rounds for x in found[name]]) | {"ratio": ratio}

    def _peer_calls(self, row: Row, ready: Ready) -> dict[str, Call]:
        """The calls of the peers that are installed and correct; the row says why the others are missing."""
        calls: dict[str, Call] = {}
        for name, make in ready.peers.items() if self.with_peers else ():
            try:
                with warnings.catch_warnings():  # the row says why a peer does not take part
                    warnings.simplefilter("ignore")
                    peer = make()
                    result = peer.call()
                off = (peer.error or ready.error)(result) if peer.judged else 0.0
                self.place.synchronize()
            except ImportError:
                self.absent[name] = None
            except NotImplementedError as error:
                row["peers"][name] = {"without": reason_of(error)}
            except Exception as error:
                row["peers"][name] = {"failed": reason_of(error)}
            else:
                if off <= 1:
                    calls[name] = peer.call
                else:
                    row["peers"][name] = {"wrong": off}
        return calls
