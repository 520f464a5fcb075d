"""What the backend of a card does with arrays of other libraries, without a card."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import scipy.sparse

pytest.importorskip("cupy")

from cupyx.scipy.sparse import _base as cupyx_base

from bsrgemm._backend import cupy_backend, dlpack
from bsrgemm._backend.cupy_backend import CupyBackend
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._backend.registry import cuda

CARD = CupyBackend()


class Foreign:
    """An array on a kind of device of DLPack, with or without the CUDA array interface."""

    def __init__(self, kind: int, interface: bool) -> None:
        self.kind = kind
        if interface:
            self.__cuda_array_interface__: dict[str, Any] = {}

    def __dlpack__(self, **options: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0


class CudaError(RuntimeError):
    """An error of an earlier kernel."""


CudaError.__module__ = "cupy_backends.cuda.api.runtime"


class Own:
    """An array of the card itself."""


def stand_in(error: Exception | None = None) -> Any:
    def reads(how: str) -> Any:
        def read(x: Any) -> Any:
            if error is not None:
                raise error
            return how

        return read

    return SimpleNamespace(ndarray=Own, asarray=reads("by the interface"), from_dlpack=reads("by DLPack"))


def adopted(x: Any, error: Exception | None = None) -> Any:
    with (
        patch.object(cupy_backend, "cupy", stand_in(error)),
        patch.object(cupy_backend.graphs, "is_capturing", lambda: False),
    ):
        return CARD.adopt(x)


def test_arrays_on_a_card_are_read_where_they_are() -> None:
    own = Own()
    assert adopted(own) is own and adopted(object()) is None
    for kind in (dlpack.CUDA, dlpack.CUDA_MANAGED):
        assert adopted(Foreign(kind, True)) == adopted(Foreign(kind, False)) == "by DLPack"
    assert adopted(Foreign(9, True)) == "by the interface"
    for kind in (dlpack.CPU, dlpack.CUDA_HOST, 9):
        assert adopted(Foreign(kind, False)) is None


def test_an_array_that_nothing_can_read_is_refused_with_the_reason() -> None:
    with pytest.raises(dlpack.Unreadable, match="cannot be read through DLPack: of 3 bits"):
        adopted(Foreign(9, True), ValueError("of 3 bits"))


def test_an_error_of_the_card_itself_is_not_taken_for_one_of_the_array() -> None:
    for kind in (9, dlpack.CUDA):
        with pytest.raises(CudaError):
            adopted(Foreign(kind, True), CudaError("an illegal memory access"))


def test_sparse_classes_are_those_of_cupy() -> None:
    assert CARD.bases(True) == (cupyx_base._spbase, cupyx_base.sparray)
    assert CARD.bases(False) == (cupyx_base._spbase, cupyx_base.spmatrix)
    assert [d.char for d in CARD.foreign_dtypes] == list("?fdFD")
    assert CARD.name == "cuda" and CARD.loops is None
    assert CARD.array_priority == cupyx_base._spbase.__array_priority__
    assert HOST.array_priority == scipy.sparse.bsr_array.__array_priority__


def test_an_array_keeps_its_order_on_the_way_to_the_host() -> None:
    asked: list[Any] = []
    CARD.to_host(SimpleNamespace(get=lambda **options: asked.append(options)))
    assert asked == [{"order": "A"}]


def test_there_is_one_backend_of_the_card() -> None:
    assert cuda() is cuda() and isinstance(cuda(), CupyBackend)
