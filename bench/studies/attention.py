"""Attention: masks and shapes, many small heads, decode, long sequences, densities, hard inputs, gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ..cases.attention import Attention, Decode, Gradients
from ..checks import Reference, exact_gradients
from ..data import widen
from ..measure import Row, Run, reason_of
from ..peers import attention as peers
from ..peers import gradients as gradient_peers
from ..place import Place
from ..report import BANDWIDTH, RATE, ROOF, TIME, USUAL, Column, Peers, error, field, three, times
from ..study import Sizes, Study, of_cases

LONG = (1, 16, 16384, 128)
WINDOW = 2048


def _on_cpu() -> list[Attention]:
    """The same for a CPU: much smaller, in float32."""
    masks: list[dict[str, Any]] = [{}, {"causal": True}, {"window": 64}, {"blocks": (32, 3)}]
    return [Attention(1, 4, 512, 64, kind="float32", **mask) for mask in masks]


def table(place: Place) -> list[Attention]:
    """Shapes, masks, head dims and kinds of numbers."""
    few = [
        Attention(*LONG, back_to_back=True),
        Attention(*LONG, causal=True, back_to_back=True),
        Attention(*LONG, window=WINDOW),
        Attention(*LONG, blocks=(128, 26), per_head=True),
        Attention(*LONG, blocks=(64, 51)),
    ]
    if not place.on_gpu or place.quick:
        return few if place.on_gpu else _on_cpu()
    both = (False, True)
    return [
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
    ]


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
    return [Decode(1, S, kind=kind) for S in sizes.size or (8192,) for kind in kinds]


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


def _made(run: Run, name: str, make: Callable[[], Any]) -> Any:
    """What a peer prepares, or None where it cannot."""
    try:
        return make()
    except ImportError:
        run.absent[name] = None
    except Exception as reason:
        run.say(f"{name}: {reason_of(reason)}")
    return None


def accuracy(run: Run) -> Iterator[Row]:
    """Error against float64 and time, on inputs that are hard for an online softmax; means of several draws."""
    place = run.place
    case = Attention(1, 16, 8192, 128) if place.on_gpu else Attention(1, 2, 256, 64, kind="float32")
    plain: dict[str, float] = {}
    kinds = [(hard, case.kind) for hard in place.some(HARD, HARD[:3])]
    for hard, kind in [*kinds, *([("plain", "bfloat16")] if place.on_gpu else [])]:
        yield _attempted(f"{hard}, {kind}", partial(_hard_row, run, hard, replace(case, kind=kind), plain))


def _attempted(what: str, measure: Callable[[], Row]) -> Row:
    try:
        return {"what": what} | measure()
    except Exception as reason:
        return {"what": what, "failed": reason_of(reason)}


def _hard_row(run: Run, hard: str, case: Attention, plain: dict[str, float]) -> Row:
    place = run.place
    errors: dict[str, list[float]] = {}
    for _ in range(4 if place.on_gpu and not place.quick else 1):  # the largest error of one draw moves by 10 %
        q, k, v = hard_inputs(place, hard, case)
        # of all queries: the largest of a few errors would be a matter of luck
        reference = Reference.of(case.seen(None), q, k, v, whole=True)
        ours = case.call(place, q, k, v, None)
        makers = {name: partial(peers.PEERS[name], q, k, v) for name in ("cuDNN", "flash", "FA4")}
        made = {n: _made(run, n, make) for n, make in makers.items() if place.on_gpu and run.with_peers}
        for name, call in ({"bsrgemm": ours} | made).items():
            if call is not None:
                errors.setdefault(name, []).append(reference.error(peers.as_array(call())))
    seconds = place.seconds(ours)
    slower = seconds / plain.setdefault(case.kind, seconds)
    return {"errors": {name: float(np.mean(e)) for name, e in errors.items()}, "seconds": seconds, "slower": slower}


def _best(errors: dict[str, float]) -> tuple[str, float] | None:
    others = {name: value for name, value in errors.items() if not name.startswith("bsrgemm")}
    return min(others.items(), key=lambda item: item[1]) if others else None


def _over_best(row: Row) -> str:
    best = _best(row["errors"])
    return (
        "" if best is None or not best[1] else f"{row['errors']['bsrgemm'] / best[1]:.2f} x {error(best[1])}, {best[0]}"
    )


_ACCURACY = (
    Column("bsrgemm", lambda row: error(row["errors"]["bsrgemm"])),
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
    return [Gradients(case) for case in (place.some(found, found[:3]) if place.on_gpu else _on_cpu())]


#: Gradients of something that has none are noise: left out below this share of the largest gradient of all
_NOISE = 1e-6
_NAMES = ("dq", "dk", "dv")


def gradient_errors(run: Run) -> Iterator[Row]:
    """The largest errors of dq, dk and dv over their largest values, on plain and hard inputs; means of draws."""
    place = run.place
    S, kinds = (2048, ("float16", "bfloat16")) if place.on_gpu else (256, ("float32",))
    for kind, causal, hard in product(kinds, (False, True), place.some(HARD, HARD[:2])):
        case = Attention(1, 2, S, 128 if place.on_gpu else 64, causal, kind=kind)
        yield _attempted(f"{hard}, {kind}, {case.mask_name}", partial(_hard_gradients, run, hard, case))


def _hard_gradients(run: Run, hard: str, case: Attention) -> Row:
    place, whole = run.place, Gradients(case)
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(8 if place.on_gpu and not place.quick else 2):
        x = whole.operands(place, hard_inputs(place, hard, case))
        want = exact_gradients(x.q, x.k, x.v, x.dout, case.causal)
        got: dict[str, Any] = {"bsrgemm": whole.call(x, place)(), "bsrgemm, any order": whole.call(x, place, False)()}
        for name, make in gradient_peers.PEERS.items() if run.with_peers and place.on_gpu else ():
            made = _made(run, name, partial(make, x, case))
            if made is not None and made.gradients is not None:
                got[name] = made.gradients(made.call())
        largest = [float(abs(y).max()) for y in want]
        for who, results in got.items():
            for name, y, exact, size in zip(_NAMES, results, want, largest, strict=False):
                if size > _NOISE * max(largest):
                    off = float(abs(widen(y) - exact).max()) / size
                    found.setdefault(who, {}).setdefault(name, []).append(off)
    return {"errors": {who: {g: float(np.mean(e)) for g, e in of.items()} for who, of in found.items()}}


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


_MEMORY = field("extra MB", "peak_bytes", three, 1e-6)
STUDIES: tuple[Study, ...] = (
    of_cases("attention", "attention", table, sized=table_sized),
    of_cases("attention-small", "attention of many small heads, by replays of a CUDA graph", small),
    of_cases("decode", "attention of one token on a KV cache, by replays of a CUDA graph", decode,
             (TIME, BANDWIDTH, ROOF, Peers(), *USUAL[4:]), sized=decode_sized),
    of_cases("attention-long", "attention on long sequences, and the memory that it takes", long,
             (TIME, RATE, _MEMORY, Peers()), peak=True),
    of_cases("attention-density", "attention by density of random blocks", by_density,
             (TIME, RATE, Peers())),
    Study("attention-error", "attention on hard inputs: largest error over max(1, size)", accuracy, _ACCURACY),
    of_cases("gradients", "gradients of attention, all kernels of a call, and the memory that they take", gradients,
             (TIME, RATE, _MEMORY, Peers()), peak=True),
    Study("gradients-error", "gradients on hard inputs: largest error over the largest value", gradient_errors,
          (*map(_gradient_error, _NAMES), Column("dq, dk, dv over the best peer's", _ratios))),
)  # fmt: skip
