"""Attention: masks and shapes, many small heads, decode, long sequences, densities, hard inputs, gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np

import bsrgemm as bg

from ..cases.attention import Attention, Decode, Gradients
from ..checks import Reference, exact_gradients
from ..data import widen
from ..measure import Row, Run, reason_of
from ..peers import attention as peers
from ..peers import gradients as gradient_peers
from ..place import Call, Place
from ..report import BANDWIDTH, RATE, ROOF, TIME, USUAL, Column, Peers, duration, error, field, three, times
from ..study import Sizes, Study, of_cases

LONG = (1, 16, 16384, 128)
WINDOW = 2048


def _small(case: Attention) -> Attention:
    """The same for a CPU: much smaller, in float32."""
    B, H, S, D = case.shape
    S = min(512, S // 8)
    blocks = None
    if case.blocks is not None:  # of the same density
        size, each = case.blocks
        blocks = (16, max(1, size * each * S // 16 // case.length))
    return replace(
        case, batch=min(B, 2), heads=min(H, 4), length=S, head_dim=min(D, 64), window=case.window and 64,
        blocks=blocks, kv_heads=case.kv_heads and 1, kind="float32", beside=("NumPy",) if case.beside is None else (),
    )  # fmt: skip


def _here(place: Place, cases: list[Attention]) -> list[Attention]:
    """The cases as they are, or those that a CPU has in small, each once."""
    if place.on_gpu:
        return cases
    kept = [case for case in cases if case.kernel is None and case.kind != "e4m3"]
    return list(dict.fromkeys(_small(case) for case in kept))


def table(place: Place) -> list[Attention]:
    """Shapes, masks, head dims and kinds of numbers."""
    few = [
        Attention(*LONG, back_to_back=True),
        Attention(*LONG, causal=True, back_to_back=True),
        Attention(*LONG, window=WINDOW),
        Attention(*LONG, blocks=(128, 26), per_head=True),
        Attention(*LONG, blocks=(64, 51)),
    ]
    if place.quick:
        return _here(place, few)
    both = (False, True)
    return _here(place, [
        *few,
        Attention(*LONG, kernel="AttentionSm80", beside=("flash",)),
        *(Attention(*LONG, causal=c, kind="e4m3", beside=("float16",)) for c in both),
        Attention(1, 8, 131072, 128, window=WINDOW),
        Attention(1, 7, 109632, 128, blocks=(64, 64)),
        *(Attention(4, 16, 4096, 128, c) for c in both),
        *(Attention(16, 16, 1024, 128, c) for c in both),
        *(Attention(1, 32, 16384, 64, c) for c in both),
        Attention(*LONG, causal=True, kind="bfloat16"),
        Attention(1, 32, 8192, 128, True, kv_heads=8),
        *(Attention(1, 16, 8192, D, True) for D in (80, 96, 192, 256)),
    ])  # fmt: skip


def table_sized(place: Place, sizes: Sizes) -> list[Attention]:
    found = []
    block = (sizes.block or (128 if place.on_gpu else 64,))[0]
    kinds = sizes.dtype or ("float16" if place.on_gpu else "float32",)
    for S, kind in product(sizes.size or (16384 if place.on_gpu else 1024,), kinds):
        one = partial(Attention, 1, 16 if place.on_gpu else 4, S, 128, kind=kind)
        if kind != "tf32":
            found += [one(blocks=(block, max(1, round(d * S / block)))) for d in sizes.density]
            found += [] if sizes.density else [one(), one(causal=True)]
    return found


def small(place: Place) -> list[Attention]:
    """Many small heads, by replays of a CUDA graph."""
    heads = place.some((8, 16, 32, 64, 96, 128), (8, 128))
    if not place.on_gpu:
        return [Attention(1, H, 64, 64, kind="float32", replayed=True) for H in (8, 128)]
    return [Attention(1, H, 512, 64, replayed=True, back_to_back=True) for H in heads]


def decode(place: Place) -> list[Decode]:
    if not place.on_gpu:
        found = [Decode(B, 512, page=page, kind="float32") for B in (1, 2) for page in (None, 64)]
        return [*found, Decode(1, 2048, kind="float32", share=1 / 16)]
    found = [Decode(B, S, page=page) for page in (None, 64) for B, S in ((1, 8192), (1, 131072), (32, 8192))]
    return list(place.some([*found, *(Decode(1, 131072, page=page, share=1 / 16) for page in (None, 64))], found[:3]))


def decode_sized(place: Place, sizes: Sizes) -> list[Decode]:
    kinds = sizes.dtype or ("float16" if place.on_gpu else "float32",)
    served = ("float16", "bfloat16") if place.on_gpu else ("float16", "bfloat16", "float32", "float64")
    return [Decode(1, S, kind=kind) for S in sizes.size or (8192,) for kind in kinds if kind in served]


def long(place: Place) -> list[Attention]:
    """Dense causal attention at the first length; a window and 5 % random blocks at all of them."""
    H, D, size, window = (8, 128, 128, WINDOW) if place.on_gpu else (2, 64, 16, 64)
    kind = "float16" if place.on_gpu else "float32"
    lengths = place.some((131072, 262144, 524288), (131072,)) if place.on_gpu else (1024, 2048)
    found = [Attention(1, H, lengths[0], D, causal=True, kind=kind, beside=("cuDNN", "FA4"))]
    for S in lengths:
        found.append(Attention(1, H, S, D, window=window, kind=kind, beside=()))
        found.append(Attention(1, H, S, D, blocks=(size, max(1, round(0.05 * S / size))), kind=kind, beside=()))
    return found


def by_density(place: Place) -> list[Attention]:
    """Random blocks, beside attention of everything."""
    shape, size, kind = ((1, 8, 32768, 128), 128, "float16") if place.on_gpu else ((1, 2, 512, 64), 16, "float32")
    densities = place.some((0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1.0), (0.05, 0.2, 1.0))
    every = [max(1, round(density * shape[2] / size)) for density in densities]
    return [Attention(*shape, blocks=(size, each), kind=kind, beside=("full",)) for each in every]


def _over_share(row: Row) -> str:
    """The time over density times that of everything."""
    full = row.get("peers", {}).get("full", {}).get("seconds")
    return three(row["seconds"] / (row["density"] * full)) if full else ""


# ----------------------------------------------------------------------------------------- accuracy
HARD = ("plain", "rising ramp", "one huge key", "scores to 1e4", "constant rows")


def hard_inputs(place: Place, kind: str, case: Attention) -> list[Any]:
    """q, k and v whose scores do what `kind` says."""
    xp, (_, _, S, D) = place.xp, case.shape
    q, k, v = case.operands(place)
    side = xp.asarray(np.where(np.arange(D) % 3, 1.0, -1.0).astype(np.float32))

    def along(steps: Any) -> Any:
        """Keys in one direction, key j `steps[j]` far."""
        return xp.asarray(np.asarray(steps, np.float32))[:, None] * side

    if kind == "rising ramp":  # a score of 11.3 for each unit at head dim 128: 0 to 30, with noise
        q[...] = (side + 0.3 * q.astype(np.float32)).astype(q.dtype)
        k[...] = along(np.linspace(0, 30 / D**0.5, S)).astype(k.dtype)
    elif kind == "one huge key":
        k[:, :, -1] = 60
    elif kind == "scores to 1e4":
        far = (1e4 / D**0.5) ** 0.5
        q[...] = (far * side).astype(q.dtype)
        k[...] = along(np.random.default_rng(0).permutation(np.linspace(-far, far, S))).astype(k.dtype)
    elif kind == "constant rows":
        q[...], k[...] = 1, 0.5
    return [q, k, v]


def accuracy(run: Run) -> Iterator[Row]:
    """Error against float64 and time, on inputs that are hard for an online softmax; means of several draws.

    The largest error of one draw moves by 10 % from draw to draw.
    """
    place = run.place
    case = Attention(1, 16, 8192, 128) if place.on_gpu else Attention(1, 2, 256, 64, kind="float32")
    plain: dict[str, float] = {}
    kinds = [(hard, case.kind) for hard in place.some(HARD, HARD[:3])]
    for hard, kind in [*kinds, *([("plain", "bfloat16")] if place.on_gpu else [])]:
        row: Row = {"what": f"{hard}, {kind}", "peers": {}}
        try:
            _hard_row(run, row, hard, replace(case, kind=kind), plain)
        except Exception as reason:
            row["failed"] = reason_of(reason)
        yield row


def _hard_row(run: Run, row: Row, hard: str, case: Attention, plain: dict[str, float]) -> None:
    place = run.place
    errors: dict[str, list[float]] = {}
    for _ in range(4 if place.on_gpu and not place.quick else 1):
        q, k, v = hard_inputs(place, hard, case)
        # of all queries: the largest of a few errors would be a matter of luck
        reference = Reference.of(case.seen(None), q, k, v, whole=True)
        calls: dict[str, Call] = {"bsrgemm": case.call(place, q, k, v, None)}
        makers = {"cuDNN": peers.cudnn, "flash": peers.flash, "FA4": peers.fa4} if place.on_gpu else {}
        for name, make in makers.items() if run.with_peers else ():
            made = _made(run, partial(make, q, k, v), name)
            calls |= {} if made is None else {name: made}
        for name, call in calls.items():
            errors.setdefault(name, []).append(reference.error(peers.as_array(call())))
    row |= {"errors": {name: float(np.mean(every)) for name, every in errors.items()}}
    row["seconds"] = place.seconds(calls["bsrgemm"])
    row["slower"] = row["seconds"] / plain.setdefault(case.kind, row["seconds"])


def _made(run: Run, make: Callable[[], Any], name: str) -> Any:
    """What a peer prepares, or None where it cannot."""
    try:
        return make()
    except ImportError:
        run.absent[name] = None
    except Exception as reason:
        run.say(f"{name}: {reason_of(reason)}")
    return None


def _best(errors: dict[str, float]) -> tuple[str, float] | None:
    others = {name: value for name, value in errors.items() if not name.startswith("bsrgemm")}
    return min(others.items(), key=lambda item: item[1]) if others else None


def _best_cell(row: Row) -> str:
    best = _best(row["errors"])
    return "" if best is None else f"{error(best[1])} ({best[0]})"


def _over_best(row: Row) -> str:
    best = _best(row["errors"])
    return "" if best is None or not best[1] else times(row["errors"]["bsrgemm"] / best[1])


_ACCURACY = (
    Column("bsrgemm", lambda row: error(row["errors"]["bsrgemm"])),
    Column("best peer", _best_cell),
    Column("over the best peer", _over_best),
    field("time over plain inputs", "slower", times),
)


# ---------------------------------------------------------------------------------------- gradients
def gradients(place: Place) -> list[Gradients]:
    found = [
        Attention(*LONG), Attention(*LONG, causal=True), Attention(*LONG, window=WINDOW),
        Attention(1, 16, 131072, 128, window=WINDOW),
        Attention(*LONG, kind="bfloat16", blocks=(128, 26), per_head=True),
        Attention(*LONG, kind="bfloat16", blocks=(64, 51), per_head=True),
        Attention(4, 16, 4096, 128), Attention(4, 16, 4096, 128, causal=True),
        Attention(1, 32, 8192, 128, causal=True, kv_heads=8),
        Attention(1, 32, 16384, 64), Attention(1, 32, 16384, 64, causal=True),
        Attention(1, 16, 8192, 256, causal=True), Attention(*LONG, causal=True, softcap=30.0),
    ]  # fmt: skip
    return [Gradients(case) for case in _here(place, list(place.some(found, found[:3])))]


#: Gradients of something that has none are noise: left out below this share of the largest gradient of all
_NOISE = 1e-6
_NAMES = ("dq", "dk", "dv")


def gradient_errors(run: Run) -> Iterator[Row]:
    """The largest errors of dq, dk and dv over their largest values, on plain and hard inputs; means of draws."""
    place = run.place
    S, kinds = (2048, ("float16", "bfloat16")) if place.on_gpu else (256, ("float32",))
    for kind, causal, hard in product(kinds, (False, True), place.some(HARD, HARD[:2])):
        case = Attention(1, 2, S, 128 if place.on_gpu else 64, causal, kind=kind)
        row: Row = {"what": f"{hard}, {kind}, {case.mask_name}"}
        found: dict[str, dict[str, list[float]]] = {}
        try:
            for _ in range(8 if place.on_gpu and not place.quick else 2):
                _draw(run, hard, case, found)
            row["errors"] = {who: {g: float(np.mean(e)) for g, e in of.items()} for who, of in found.items()}
        except Exception as reason:
            row["failed"] = reason_of(reason)
        yield row


def _draw(run: Run, hard: str, case: Attention, found: dict[str, dict[str, list[float]]]) -> None:
    place, whole = run.place, Gradients(case)
    q, k, v = hard_inputs(place, hard, case)
    out, lse = bg.attention(q, k, v, return_lse=True, **case.options)
    x = SimpleNamespace(q=q, k=k, v=v, dout=place.draw(case.shape, case.kind), out=out, lse=lse, mask=None,
                        options=case.options)  # fmt: skip
    want = exact_gradients(q, k, v, x.dout, case.causal)
    got: dict[str, Any] = {"bsrgemm": whole.call(x, place)(), "bsrgemm, any order": whole.call(x, place, False)()}
    for name, make in gradient_peers.PEERS.items() if run.with_peers and place.on_gpu else ():
        made = _made(run, partial(make, x, case), name)
        if made is not None and made.gradients is not None:
            got[name] = made.gradients(made.call())
    largest = [float(abs(y).max()) for y in want]
    for who, results in got.items():
        for name, y, exact, size in zip(_NAMES, results, want, largest, strict=False):
            if size > _NOISE * max(largest):
                off = float(abs(widen(y) - exact).max()) / size
                found.setdefault(who, {}).setdefault(name, []).append(off)


def _ratios(row: Row) -> str:
    """Each gradient over the best of the peers."""
    texts = []
    for name in _NAMES:
        of = {who: each[name] for who, each in row["errors"].items() if name in each}
        best = _best(of)
        texts.append("-" if best is None or not best[1] else f"{of['bsrgemm'] / best[1]:.2f}")
    return "" if set(texts) == {"-"} else ", ".join(texts)


def _gradient_error(name: str) -> Column:
    return Column(name, lambda row: error(row["errors"]["bsrgemm"].get(name, 0.0)))


def passes(run: Run) -> Iterator[Row]:
    """Both passes: times, and the memory that the gradients take beside their results."""
    place = run.place
    for case in gradients(place)[: 5 if place.on_gpu else 3]:
        row: Row = {"what": str(case), "flops": 1.4 * case.flops}
        try:
            x = case.operands(place)
            backward = case.call(x, place)
            forward = partial(bg.attention, x.q, x.k, x.v, out=x.out, return_lse=True, **x.options)

            def both(forward: Call = forward, backward: Call = backward) -> Any:
                forward()
                return backward()

            both()
            row["peak_bytes"] = place.peak_bytes(backward)
            row |= {"forward": place.seconds(forward), "backward": place.seconds(backward)}
            row["seconds"] = place.seconds(both)
        except Exception as reason:
            row["failed"] = reason_of(reason)
        place.release()
        yield row


_MEMORY = field("extra MB", "peak_bytes", three, 1e-6)
STUDIES: tuple[Study, ...] = (
    of_cases("attention", "attention", table, sized=table_sized),
    of_cases("attention-small", "attention of many small heads, by replays of a CUDA graph", small,
             (TIME, Column("time a head", lambda row: duration(row["seconds"] / row["shape"][1])), *USUAL[1:])),
    of_cases("decode", "attention of one token on a KV cache, by replays of a CUDA graph", decode,
             (TIME, BANDWIDTH, ROOF, Peers(), *USUAL[4:]), sized=decode_sized),
    of_cases("attention-long", "attention on long sequences, and the memory that it takes", long,
             (TIME, RATE, _MEMORY, Peers()), peak=True),
    of_cases("attention-density", "attention by density of random blocks", by_density,
             (TIME, RATE, Column("over density x full", _over_share))),
    Study("attention-error", "attention on hard inputs: largest error over max(1, size)", accuracy, _ACCURACY),
    of_cases("gradients", "gradients of attention, all kernels of a call", gradients),
    Study("gradients-error", "gradients on hard inputs: largest error over the largest value", gradient_errors,
          (*map(_gradient_error, _NAMES), Column("dq, dk, dv over the best peer's", _ratios))),
    Study("gradients-passes", "both passes of attention: time and memory", passes,
          (field("forward", "forward", duration), field("backward", "backward", duration),
           field("both", "seconds", duration), RATE, _MEMORY)),
)  # fmt: skip
