"""One of the two processes of `compare`: loads one checkout of bsrgemm and times cases of this benchmark on request.

It is started as a script, reads a line of JSON for each thing to do and answers with one. The clock is that of the
checkout that this file is in, on both sides.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Operations for a byte up to which a case stands beside a copy, not a dense product
_BY_BYTES = 100


def load(tree: str) -> None:
    """Import bsrgemm of a checkout, and the cases and the clock of this one."""
    sys.path.insert(0, tree)
    importlib.import_module("bsrgemm")
    sys.path[0] = str(ROOT)
    kernels = importlib.import_module("bsrgemm._kernels")
    name = "bsrgemm._kernels.timing"
    spec = importlib.util.spec_from_file_location(name, ROOT / "bsrgemm" / "_kernels" / "timing.py")
    assert spec is not None and spec.loader is not None
    clock = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(clock)
    kernels.timing = clock  # type: ignore[attr-defined]


class Worker:
    """The cases of some studies, and what has been prepared."""

    def __init__(self, device: str, studies: Sequence[str], full: bool) -> None:
        import bsrgemm
        from bench import studies as every
        from bench.place import Place

        self.file = str(bsrgemm.__file__)
        self.place = Place(device, quick=device == "cpu")
        choosing = Place(device, quick=not full)
        self.cases: dict[str, Any] = {}
        for name in studies:
            if name not in every.ALL or every.ALL[name].cases is None:
                known = ", ".join(study.name for study in every.ALL.values() if study.cases)
                raise ValueError(f"{name}: expected a study with cases: {known}")
            self.cases |= {f"{name}: {case}": case for case in every.ALL[name].cases(choosing)}  # type: ignore[misc]
        self.calls: dict[str, Callable[[], Any]] = {}
        self.host: dict[str, Callable[[], Any]] = {}

    def card(self, name: str) -> str:
        """What stands for the speed of the card beside a case, kept for all cases of its kind."""
        from bench.peers.products import dense

        case, xp, place = self.cases[name], self.place.xp, self.place
        kind = "copy" if case.flops < _BY_BYTES * case.moved else "dense product"
        if kind not in self.calls:
            if kind == "copy":
                source = xp.ones((1 << 27) if place.on_gpu else (1 << 20), "float64")
                target = xp.empty_like(source)
                self.calls[kind] = lambda: xp.copyto(target, source)
            else:
                n, dtype = (8192, "float16") if place.on_gpu else (512, "float32")
                A, B = place.draw((n, n), dtype), place.draw((n, n), dtype)
                self.calls[kind] = dense(A, B, xp.empty_like(A))
        return kind

    def checksum(self, result: Any) -> float:
        """The mean size of the numbers of a result: of blocks, or of the first of several arrays."""
        from bench.data import widen

        result = result[0] if isinstance(result, tuple) else result
        return float(abs(widen(result.data if hasattr(result, "blocksize") else result)).mean())

    def prepare(self, name: str) -> dict[str, Any]:
        from bench.data import reseed

        reseed()
        self.calls[name] = self.cases[name].ready(self.place).call
        checksum = self.checksum(self.calls[name]())
        return {"checksum": checksum, "beside": self.card(name)}

    def host_times(self) -> dict[str, float]:
        """Host seconds of each small call as multiples of an addition of two small arrays."""
        from bench.studies.calls import add_seconds, host_calls

        self.host = self.host or host_calls(self.place)
        unit = add_seconds(self.place)
        return {name: self.place.host_seconds(call) / unit for name, call in self.host.items()}

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What a command gives."""
        what, name = asked["do"], asked.get("case", "")
        if what == "hello":
            return {"file": self.file, "cases": list(self.cases)}
        if what == "prepare":
            return self.prepare(name)
        if what == "time":
            seconds = self.place.seconds
            return {"ours": seconds(self.calls[name]), "card": seconds(self.calls[self.card(name)])}
        if what == "drop":
            self.calls.pop(name, None)
            self.place.release()
            return {}
        if what == "host":
            return {"adds": self.host_times()}
        raise ValueError(f"do: expected hello, prepare, time, drop or host, got {what!r}")


def serve(tree: str, device: str, full: str, *studies: str) -> None:
    """Answer line by line; a failure is reported in one line, and the traceback goes to standard error."""
    answers, sys.stdout = sys.stdout, sys.stderr  # so that nothing else writes between the answers
    worker: Worker | None = None
    for line in sys.stdin:
        try:
            if worker is None:
                load(tree)
                worker = Worker(device, studies, full == "1")
            found = worker.answer(json.loads(line))
        except Exception as error:
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
