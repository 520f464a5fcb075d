"""Every number that a public call takes: bools, NaN, text, and arrays in its place are refused by the name it has."""

from __future__ import annotations

import inspect
import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg

Mask = bg.BlockMask
#: What stands in for a number by mistake. An error names the argument, whatever is wrong with it.
NO_NUMBERS: dict[str, Any] = {
    "a bool": True,
    "a bool of NumPy": np.True_,
    "NaN": math.nan,
    "text": "3",
    "bytes": b"3",
    "two numbers": np.array([1, 2]),
    "a matrix": np.ones((2, 2)),
    "no number": np.zeros(0),
    "NaN in no dimensions": np.array(math.nan),
    "a complex number": 1j,
    "an object": object(),
    "a dictionary": {},
}
NO_INTEGERS = NO_NUMBERS | {"a fraction": 1.5, "infinity": math.inf}
NO_PAIRS = {
    "two bools": (True, True),
    "two NaNs": (math.nan, math.nan),
    "two texts": ("1", "2"),
    "one number": (1,),
    "two fractions": (1.5, 2.5),
    "text": "33",
    "NaN": math.nan,
    "a matrix": np.ones((2, 2)),
}
#: What stands in for a name by mistake.
NO_NAMES = {"a number": 3, "an array": np.array([1, 2]), "an empty array": np.zeros(0), "a bool": True, "bytes": b"cpu"}
#: More than 64 bits hold, where the argument is a size of something that is stored.
TOO_LARGE = {"2**70": 2**70}


def matrix() -> Any:
    return bg.bsr_array(4 * np.eye(8) - np.eye(8, k=1) - np.eye(8, k=-1), blocksize=(2, 2))


def fp8() -> Any:
    return bg.bsr_array(np.eye(32, dtype=np.uint8), blocksize=(16, 16))


def tokens(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def cache() -> bg.KVCache:
    made = bg.KVCache(1, 2, 64, 16, dtype="float32", device="cpu")
    made.append(tokens(1, 2, 32, 16), tokens(1, 2, 32, 16))
    return made


def method(make: Callable[[], Any], name: str) -> Callable[..., Any]:
    """A method of an object that is made for each call."""
    return lambda *args, **options: getattr(make(), name)(*args, **options)


def full() -> Mask:
    return Mask.full(32, block=16, device="cpu")


def saved() -> Any:
    file = io.BytesIO()
    bg.save_npz(file, matrix())
    file.seek(0)
    return file


_ATTENTION = {name: tokens(1, 2, 16, 16) for name in "qkv"}
_GRID = {"queries": 32, "keys": 32, "block": 16, "device": "cpu"}
_ALIGNED = _GRID | {"align": "top-left"}
_SOLVER: dict[str, Any] = {"A": matrix(), "b": np.ones(8), "rtol": 1e-5, "atol": 0.0, "maxiter": 20, "callback": None}
_AMG: dict[str, Any] = {"degree": 2, "smoother": "chebyshev", "cycle": "V"}
_BACKWARD = {"dout": _ATTENTION["q"], "out": _ATTENTION["q"], "lse": tokens(1, 2, 16)}

#: A call that is right, by its public name.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "BlockMask.causal": (Mask.causal, _ALIGNED),
    "BlockMask.dilated": (Mask.dilated, _ALIGNED | {"count": 2, "dilation": 2}),
    "BlockMask.documents": (Mask.documents, {"cu_seqlens": [0, 16, 32], "block": 16, "device": "cpu"}),
    "BlockMask.elements": (method(lambda: Mask.causal(32, block=16, device="cpu"), "elements"), {"kind": 0}),
    "BlockMask.from_block_indices": (
        Mask.from_block_indices,
        {"indptr": [0, 1, 2], "indices": [0, 1], "shape": (32, 32), "block": 16, "heads": (1, 1)},
    ),
    "BlockMask.from_dense": (Mask.from_dense, {"allowed": np.ones((32, 32), bool), "block": 16}),
    "BlockMask.full": (Mask.full, _GRID),
    "BlockMask.global_tokens": (Mask.global_tokens, _ALIGNED | {"tokens": 2}),
    "BlockMask.plot": (method(full, "plot"), {"batch": 0, "head": 0}),
    "BlockMask.prefix": (Mask.prefix, _ALIGNED | {"length": 2}),
    "BlockMask.random": (Mask.random, _GRID | {"per_row": 1, "heads": (1, 1), "seed": 0}),
    "BlockMask.sinks": (Mask.sinks, _GRID | {"count": 2}),
    "BlockMask.stack": (Mask.stack, {"masks": [full(), full()], "axis": "heads"}),
    "BlockMask.to_device": (method(full, "to_device"), {"device": "cpu"}),
    "BlockMask.window": (Mask.window, _ALIGNED | {"left": 2, "right": 2}),
    "KVCache": (
        bg.KVCache,
        {"batch": 1, "kv_heads": 2, "capacity": 64, "head_dim": 16, "value_dim": 16, "page": 16, "pages": 8}
        | {"device": "cpu", "dtype": "float32"},
    ),
    "KVCache.gathered": (method(cache, "gathered"), {"sequence": 0}),
    "KVCache.reserve": (method(cache, "reserve"), {"tokens": 4}),
    "KVCache.reset": (method(cache, "reset"), {"sequence": 0}),
    "attention": (
        bg.attention,
        _ATTENTION | {"window": (2, 2), "scale": 0.5, "softcap": 2.0, "layout": "bhsd", "align": "top-left"},
    ),
    "attention_backward": (
        bg.attention_backward,
        _ATTENTION
        | _BACKWARD
        | {"window": (2, 2), "scale": 0.5, "softcap": 2.0, "layout": "bhsd", "align": "top-left"},
    ),
    "attention_decode": (
        bg.attention_decode,
        {"q": tokens(1, 2, 1, 16), "cache": cache(), "blocks": np.zeros((1, 1, 1), np.int32), "block": 16}
        | {"scale": 0.5, "softcap": 2.0, "layout": "bhsd"},
    ),
    "attention_decode of a window": (
        bg.attention_decode,
        {"q": tokens(1, 2, 1, 16), "cache": cache(), "window": (4, 0)},
    ),
    "bsr_array": (
        bg.bsr_array,
        {"arg1": np.eye(8), "shape": (8, 8), "blocksize": (2, 2), "maxprint": 4, "device": "cpu"},
    ),
    "bsr_array.asformat": (method(matrix, "asformat"), {"format": "csr"}),
    "bsr_array.diagonal": (method(matrix, "diagonal"), {"k": 0}),
    "bsr_array.max": (method(matrix, "max"), {"axis": 0}),
    "bsr_array.mean": (method(matrix, "mean"), {"axis": 0}),
    "bsr_array.power": (method(matrix, "power"), {"n": 2}),
    "bsr_array.reshape": (lambda shape, order: matrix().reshape(shape, order=order), {"shape": (4, 16), "order": "C"}),
    "bsr_array.resize": (lambda shape: matrix().resize(shape), {"shape": (4, 16)}),
    "bsr_array.setdiag": (method(matrix, "setdiag"), {"values": 1.0, "k": 0}),
    "bsr_array.sum": (method(matrix, "sum"), {"axis": 0}),
    "bsr_array.to_device": (method(matrix, "to_device"), {"device": "cpu"}),
    "bsr_array.toarray": (method(matrix, "toarray"), {"order": "C"}),
    "bsr_array.tobsr": (method(matrix, "tobsr"), {"blocksize": (4, 4)}),
    "bsr_array.trace": (method(matrix, "trace"), {"offset": 0}),
    "bsr_array.transpose": (method(matrix, "transpose"), {"axes": (1, 0)}),
    "bsr_batch": (bg.bsr_batch, {"arg1": (np.ones((2, 4, 2, 2)), np.arange(4), np.arange(5)), "shape": (8, 8)}),
    "bsr_batch.to_device": (method(lambda: bg.bsr_batch([matrix()]), "to_device"), {"device": "cpu"}),
    "diags": (bg.diags, {"blocks": np.ones((3, 2, 2)), "offsets": 1, "shape": (8, 8), "device": "cpu"}),
    "eye": (bg.eye, {"m": 8, "n": 8, "k": 0, "blocksize": (1, 1), "device": "cpu"}),
    "from_dense": (bg.from_dense, {"X": np.eye(8), "blocksize": (2, 2), "threshold": 0.5, "device": "cpu"}),
    "linalg.block_ssor": (linalg.block_ssor, {"A": matrix(), "omega": 1.0, "order": "colours"}),
    "linalg.chebyshev": (linalg.chebyshev, {"A": matrix(), "degree": 3, "low": 0.05, "high": 1.1}),
    "linalg.constrain": (linalg.constrain, {"A": matrix(), "b": np.ones(8), "dofs": [0], "values": 0.0}),
    "linalg.ic0": (linalg.ic0, {"A": matrix(), "order": "colours"}),
    "linalg.ilu0": (linalg.ilu0, {"A": matrix(), "order": "colours"}),
    "linalg.lobpcg": (
        linalg.lobpcg,
        {"A": matrix(), "X": tokens(8, 1).astype(float), "tol": 1.0, "maxiter": 5}
        | {"verbosityLevel": 0, "restartControl": 20},
    ),
    "linalg.minres": (linalg.minres, _SOLVER | {"shift": 0.0}),
    "linalg.smoothed_aggregation": (
        linalg.smoothed_aggregation,
        {"A": matrix(), "theta": 0.0, "max_coarse": 2, "max_levels": 3} | _AMG,
    ),
    "load_npz": (lambda **options: bg.load_npz(saved(), **options), {"blocksize": (2, 2), "device": "cpu"}),
    "matmul": (bg.matmul, {"A": matrix(), "B": np.ones((8, 2)), "precision": None}),
    "matmul of fp8": (
        bg.matmul,
        {"A": fp8(), "B": np.ones((32, 16), np.uint8), "scale_a": 1.0, "scale_b": 1.0},
    ),
    "norm": (bg.norm, {"A": matrix(), "ord": 1, "axis": 0}),
    "random": (bg.random, {"m": 8, "n": 8, "blocksize": (1, 1), "density": 0.5, "seed": 1, "device": "cpu"}),
}
for _name in ("bicgstab", "cg"):
    CALLS[f"linalg.{_name}"] = (getattr(linalg, _name), _SOLVER)
for _name in ("fgmres", "gmres"):
    CALLS[f"linalg.{_name}"] = (getattr(linalg, _name), _SOLVER | {"restart": 5, "callback_type": "x"})

#: Numeric parameters that are not annotated as such, because they take something else, too.
NUMBERS = {"density", "high", "low", "n of power", "omega", "scale_a", "scale_b", "shift", "threshold", "values"}
FLOATS = {"atol", "rtol", "scale", "softcap", "theta", "tol"}
PAIRS = {"blocksize", "heads", "shape", "window"}
NAMES = {
    "align",
    "axis of stack",
    "callback_type",
    "cycle",
    "device",
    "format",
    "layout",
    "order",
    "precision",
    "smoother",
}
#: Parameters that may be several integers: an array of some is not refused.
SEVERAL = {"block", "offsets", "seed", "tokens of global_tokens"}
#: Operands, and what is tested elsewhere.
OTHERS = {"A", "B", "X", "allowed", "arg1", "b", "blocks", "cache", "callback", "cu_seqlens", "dofs", "dout", "dtype"}
OTHERS |= {"indices", "indptr", "k of attention", "k of attention_backward", "lse", "masks", "ord", "out", "q", "v"}
OTHERS |= {"axes", "values of setdiag"}
#: Sizes of something that is stored.
SIZES = {"batch of KVCache", "capacity", "head_dim", "keys", "m", "n of eye", "n of random", "queries", "value_dim"}


def kind(call: str, name: str) -> str:
    """What the parameter of a call takes."""
    function = call.split(" of ")[0].rpartition(".")[2]
    named = {name, f"{name} of {function}"}
    for what, names in {"other": OTHERS, "pair": PAIRS, "name": NAMES, "several": SEVERAL}.items():
        if named & names:
            return what
    return "number" if named & (NUMBERS | FLOATS) else "integer"


def wrong(call: str, name: str) -> dict[str, Any]:
    """What the parameter of a call refuses."""
    what = kind(call, name)
    table = {"pair": NO_PAIRS, "name": NO_NAMES, "number": NO_NUMBERS, "other": {}}.get(what, NO_INTEGERS)
    if what == "several":
        table = {key: value for key, value in table.items() if key not in ("two numbers", "no number")}
    if call.startswith("bsr_array.power") and name == "n":  # NumPy's powers are those of any number
        table = {key: table[key] for key in ("text", "bytes", "two numbers", "an object")}
    if call == "matmul of fp8":  # True is 1, as for alpha
        table = {key: value for key, value in table.items() if "bool" not in key}
    if call == "linalg.constrain" and name == "values":  # a bool is 0 or 1, and a complex value makes b complex
        table = {key: table[key] for key in ("NaN", "text", "two numbers", "an object")}
    return table | (TOO_LARGE if {name, f"{name} of {call}"} & SIZES else {})


CASES = [(call, name, key) for call, (_, given) in CALLS.items() for name in given for key in wrong(call, name)]


@pytest.mark.parametrize("call", CALLS)
def test_the_calls_are_right_as_they_are(call: str) -> None:
    function, given = CALLS[call]
    function(**given)


@pytest.mark.parametrize(("call", "name", "key"), CASES, ids=["-".join(case) for case in CASES])
def test_what_is_no_such_value_is_refused_by_name(call: str, name: str, key: str) -> None:
    function, given = CALLS[call]
    with pytest.raises((TypeError, ValueError, NotImplementedError, IndexError)) as caught:
        function(**(given | {name: wrong(call, name)[key]}))
    assert name in str(caught.value), caught.value


def numeric_parameters() -> Iterator[tuple[str, str]]:
    """Parameters of public calls whose annotation says that they are numbers."""
    places = [(name, getattr(bg, name)) for name in bg.__all__]
    places += [(f"linalg.{name}", getattr(linalg, name)) for name in linalg.__all__]
    for owner in ("BlockMask", "KVCache", "bsr_array", "bsr_batch"):
        members = inspect.getmembers(getattr(bg, owner), callable)
        places += [(f"{owner}.{name}", member) for name, member in members if not name.startswith("_")]
    numeric = {"int", "float", "tuple[int, int]", *(f"{x} | None" for x in ("int", "float", "tuple[int, int]"))}
    for name, place in places:
        if not callable(place) or name in ("BlockMask", "linalg.SolverWarning"):
            continue
        for parameter in inspect.signature(place).parameters.values():
            if parameter.annotation in numeric:
                yield name, parameter.name


def test_every_numeric_parameter_is_in_the_list() -> None:
    elsewhere = {("tune", "N"), ("bsr_matrix", "maxprint"), ("linalg.from_pyamg", "degree")}  # GPU; same code
    listed = {(call.split(" of ")[0], name) for call, (_, given) in CALLS.items() for name in given}
    missing = set(numeric_parameters()) - listed - elsewhere - {("bsr_array.transpose", "axes")}
    assert not missing


def test_more_than_64_bits_fit_where_a_float_is_meant() -> None:
    assert matrix().maximum(-(2**70)).nnz == 22
    assert bg.eye(4, k=2**70).nnz == bg.eye(4, k=-(2**70)).nnz == 0
    assert matrix().diagonal(2**70).shape == (0,)


def test_methods_return_no_sign_for_operators() -> None:
    for other in (None, object(), {}, {1}):
        with pytest.raises(TypeError, match="other: wanted a number, an array or a sparse matrix, got "):
            matrix().multiply(other)
        with pytest.raises(TypeError, match="unsupported operand"):
            matrix() * other


def test_axes_of_a_transpose_may_be_any_pair() -> None:
    for axes in ((1, 0), [1, 0], np.array([1, 0])):
        assert matrix().transpose(axes).shape == (8, 8)
    for axes in ((0, 1), np.array([0, 1]), np.array(1), np.ones((2, 3, 4)), "10", 10, []):
        with pytest.raises(ValueError, match="axes: swapping dimensions is the only"):
            matrix().transpose(axes)


def test_callbacks_that_cannot_be_called_are_told_before_anything_is_computed() -> None:
    A = matrix()
    batch = bg.bsr_batch([A])
    for solve in (linalg.cg, linalg.minres, linalg.bicgstab, linalg.gmres, linalg.fgmres):
        with pytest.raises(TypeError, match="callback: wanted a function or None, got int"):
            solve(A, np.ones(8), callback=3)
    with pytest.raises(TypeError, match="callback: wanted a function or None, got int"):
        linalg.cg(batch, np.ones((1, 8)), callback=3)


def test_files_and_dtypes_are_named() -> None:
    for file in (3, None, [], np.zeros(2)):
        with pytest.raises(TypeError, match="file: wanted a path or an open file, got "):
            bg.load_npz(file)
    for name in ("sum", "mean"):
        for dtype in ("S1", "U", object, 3, "no such"):
            with pytest.raises(TypeError, match="dtype: "):
                getattr(matrix(), name)(dtype=dtype)
    with pytest.raises(TypeError, match="dtype: "):
        matrix().power(2, dtype="S1")
    with pytest.raises(TypeError, match=r"blocks\[0\]: does not support dtype <U1"):
        bg.diags(["a", "b"])


def test_operands_of_lobpcg_are_named() -> None:
    A, X = matrix(), tokens(8, 1).astype(float)
    for name in ("A", "B", "M"):
        for operand in (np.ones((2, 2)), np.ones(8)):
            with pytest.raises(ValueError, match=rf"{name}: wanted shape \(8, 8\), as X has 8 rows"):
                linalg.lobpcg(**({"A": A, "X": X} | {name: operand}))
        for odd in (3, "a", {}, [[1.0]]):
            with pytest.raises(
                TypeError, match=rf"{name}: wanted a matrix or a linear operator, got {type(odd).__name__}"
            ):
                linalg.lobpcg(**({"A": A, "X": X} | {name: odd}))
    for Y in (3, "a", [[1.0]], np.ones(8), np.ones((2, 2)), np.array([["a"]] * 8)):
        with pytest.raises(ValueError, match=r"Y: wanted an array \(8, j\) of numbers on 'cpu', got "):
            linalg.lobpcg(A, X, Y=Y)
    for wrong_start in (np.ones(8), np.array([["a"]] * 8), np.ones((8, 1, 1))):
        with pytest.raises(ValueError, match=r"X: wanted an array \(n, k\) of numbers, got "):
            linalg.lobpcg(A, wrong_start)
    values, _ = linalg.lobpcg(lambda x: A @ x, X, maxiter=50, tol=1e-6)  # as scipy: a function
    np.testing.assert_allclose(values, np.linalg.eigvalsh(A.toarray())[-1:], rtol=1e-6)


def test_preconditioners_refuse_what_is_no_number() -> None:
    M = linalg.block_jacobi(matrix())
    for r in (np.array(["a"] * 8), np.array([None] * 8), np.zeros(8, "datetime64[s]")):
        with pytest.raises(TypeError, match="r: wanted numbers, got "):
            M @ r
