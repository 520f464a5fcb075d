"""What the fixture `device` gives a test of a kernel: an emulated card, or the card of this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from bsrgemm._kernels import jit, workspace


class Device:
    """A card and its CuPy. Tests bring arrays to it, call the library, and bring results back."""

    #: the module `cupy`
    cupy: Any

    @property
    def arch(self) -> str:
        """The architecture that kernels are chosen for."""
        raise NotImplementedError

    def needs(self, arch: str) -> None:
        """Let this be a card of an architecture, or skip the test: "sm_90a" is that one alone, others are the least."""
        raise NotImplementedError

    def captured(self, call: Callable[[], Any]) -> Any:
        """The launches of a call as a graph; `launch` runs it. The call was made before."""
        stream = self.cupy.cuda.Stream(non_blocking=True)
        self.synchronize()
        with stream:
            stream.begin_capture()
            try:
                call()
            finally:
                graph = stream.end_capture()
        return graph

    def kernels(self) -> contextlib.AbstractContextManager[list[str]]:
        """Inside, the names of the kernels that matrices and masks which are new here are prepared for."""
        return _loaded()

    def safely(self, act: Callable[[], None]) -> None:
        """Call `act`, which may touch memory that is not there: on the emulator, in a copy of this process."""
        act()

    def bystanders(self) -> Callable[[], bool]:
        """Give freed memory to arrays of others; the result tells whether nobody has written to them."""
        raise NotImplementedError

    def asarray(self, x: Any) -> Any:
        """A copy on the card, row by row."""
        return self.cupy.asarray(np.asarray(x, order="C"))

    def asnumpy(self, x: Any) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = x.get()
        return found

    def synchronize(self) -> None:
        self.cupy.cuda.Device().synchronize()

    def lying(self, x: np.ndarray[Any, Any], layout: str) -> Any:
        """A copy with another layout: "C", "F", or every second row and third column ("gaps", "backwards").

        With a number behind the letter, rows, or columns of "F", begin at multiples of so many bytes: "C16". What lies
        between the elements is 113.
        """
        order, least = layout[0], int(layout[1:] or 1) if layout[0] in "CF" and x.shape[-1] > 1 else 1
        if layout in ("gaps", "backwards"):
            shape = (*x.shape[:-2], 2 * x.shape[-2] + 1, 3 * x.shape[-1] + 2)
            view = self.cupy.full(shape, 113).astype(x.dtype)[..., 1::2, 2::3]
            view = view[..., ::-1, ::-1] if layout == "backwards" else view
            view[...] = self.asarray(x)
            return view
        y = np.ascontiguousarray(x if order == "C" else x.swapaxes(-1, -2))
        pitch = -(-y.shape[-1] * y.itemsize // least) * least // y.itemsize
        if pitch == y.shape[-1]:
            found = self.asarray(y)
        else:
            found = self.cupy.full((*y.shape[:-1], pitch), 113).astype(y.dtype)[..., : y.shape[-1]]
            found[...] = self.asarray(y)
        return found if order == "C" else found.swapaxes(-1, -2)


@contextlib.contextmanager
def _loaded() -> Iterator[list[str]]:
    names: list[str] = []
    load = jit.load

    def noting(spec: Any, arch: str) -> Any:
        names.append(spec.entry)
        return load(spec, arch)

    with patch.object(jit, "load", noting):
        yield names


class Emulated(Device):
    """An emulated card: every allocation lies beside a page that ends the process."""

    def __init__(self, card: Any, cupy: Any) -> None:
        self.card, self.cupy = card, cupy

    @property
    def arch(self) -> str:
        found: str = self.card.arch
        return found

    def needs(self, arch: str) -> None:
        assert not self.card.launches, "an emulated card becomes another one before anything is launched"
        self.card.arch = "sm_90a" if arch == "sm_90" else arch

    def safely(self, act: Callable[[], None]) -> None:
        from .emulator.forked import forked

        status, said = forked(act)
        assert status == 0, f"the process ended with {status}: {said}"

    def becomes(self, multiprocessors: int, l2_bytes: int = 50 << 20) -> None:
        """From here on this is another card, with so many multiprocessors and this L2."""
        from .fake_cupy import renumbered

        self.card.multiprocessors, self.card.l2_bytes = multiprocessors, l2_bytes
        renumbered(self.card)

    def untouched(self, count: int) -> Any:
        """Zeros of int32 in pages that the machine provides when they are first written to."""
        from .fake_cupy import untouched

        return untouched((count,), np.int32)

    def bystanders(self) -> Callable[[], bool]:
        import gc

        from .fake_cupy import Bystanders

        gc.collect()
        return Bystanders(self.card.heap).intact


class Real(Device):
    """The card of this machine."""

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy

    @property
    def arch(self) -> str:
        return jit.device_target()

    def needs(self, arch: str) -> None:
        have, want = (int(x.removeprefix("sm_").rstrip("af")) for x in (self.arch, arch))
        if have != want if arch.endswith("a") else have < want:
            pytest.skip(f"this kernel needs {arch}, the card is {self.arch}")

    def bystanders(self) -> Callable[[], bool]:
        import gc

        gc.collect()
        pool = self.cupy.get_default_memory_pool()
        free = pool.free_bytes()
        several = [self.cupy.full(512 << k, 7, np.int8) for k in range(12) for _ in range(4) if 512 << k <= free]
        return lambda: all(bool((x == 7).all()) for x in several)


@contextlib.contextmanager
def opened(way: str) -> Iterator[Device]:
    """The device of a parameter of the fixture: "emulator", "races" or "card"."""
    pytest.importorskip("cupy")
    if way == "card":
        from bsrgemm._products import tuned

        tuned._loaded.clear()  # and the kernels that were chosen by limits of another test
        yield Real()
        return
    from .emulator import emulator
    from .fake_cupy import Card, installed

    if emulator.COMPILER is None:
        pytest.skip("there is neither g++ nor clang++ on the PATH")
    if way == "races" and not emulator.can_watch_races():
        pytest.skip("races are watched in kernels that g++ compiles")
    card = Card(races=way == "races", before=way == "before")
    with installed(card) as cupy:
        yield Emulated(card, cupy)
        counters = [x for (number, *_), x in workspace._zeroed.items() if number == card.number]
        assert not any(x.get().any() for x in counters), "a kernel left counters that are not zero"
