"""The problems of ``python -m bsrgemm bench``, and how one is measured: checked, then timed in turn with its peers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import product
from statistics import median
from typing import Any

from ..cases.attentions import Attention, Decode
from ..cases.problem import Peer, Problem, Ready
from ..cases.products import Product
from ..peers.attention import SLOW_PEERS
from ..place import Ceilings, Place
from ..provenance import Launched
from ..runner import reason_of
from ..timing import Call, Timing

Row = dict[str, Any]
GROUPS = ("gemm", "spmv", "attention", "decode")
#: The number of problems whose kernels are compiled at the same time; NVRTC uses one core for each.
_SIDE_BY_SIDE = 8
KINDS = ("float16", "bfloat16", "e4m3", "tf32", "float32", "float64")


@dataclass(frozen=True)
class Choice:
    """Sizes from the command line that replace the usual ones; an empty field leaves the usual ones."""

    sizes: tuple[int, ...] = ()
    densities: tuple[float, ...] = ()
    blocks: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any((self.sizes, self.densities, self.blocks, self.columns, self.dtypes))


# --------------------------------------------------------------------------------------- problems
def problems(groups: Sequence[str], place: Place, quick: bool = False, choice: Choice | None = None) -> list[Problem]:
    """What is measured, in order, each once.

    >>> from bsrgemm._benchmark.place import Cpu
    >>> for problem in problems(["gemm"], Cpu(), choice=Choice(sizes=(256,), blocks=(32, 64), dtypes=("float32",))):
    ...     print(problem)
    float32 32 x 32, n = 256, density 0.25, 128 columns
    float32 64 x 64, n = 256, density 0.25, 128 columns
    """
    found: dict[Problem, None] = {}
    for group in groups:
        if choice:
            made: Iterator[Problem] = _chosen(group, place.name, choice)
        else:
            made = _usual(group, place.name, quick)
        found.update(dict.fromkeys(made))
    if not found:
        kinds = ", ".join(choice.dtypes) if choice else ""
        raise ValueError(f"nothing to measure: {', '.join(groups)} on {place.name} has no {kinds}")
    return list(found)


def _product(group: str, n: int, block: int, density: float, columns: int, dtype: str) -> Product:
    if n % block:
        raise ValueError(f"a size of {n} is not a multiple of the block {block}")
    stored, precision = ("float32", "tf32") if dtype == "tf32" else (dtype, None)
    return Product(group, n, (block, block), density, columns, stored, precision)


#: Kinds of numbers that a group does not support; decode on a GPU supports only 16-bit floats.
_WITHOUT = {"spmv": ("e4m3", "tf32"), "attention": ("tf32",), "decode": ("e4m3", "tf32")}
_DECODED = ("float16", "bfloat16")


def _serves(group: str, place: str, kind: str) -> bool:
    return kind not in _WITHOUT.get(group, ()) and (group != "decode" or place == "cpu" or kind in _DECODED)


def _chosen(group: str, place: str, choice: Choice) -> Iterator[Problem]:
    """Every combination of what was asked for and the group has; what was not asked for is as usual."""
    gpu = place == "cuda"
    asked = tuple(kind for kind in choice.dtypes if _serves(group, place, kind))
    if choice.dtypes and not asked:
        return
    kinds = asked or ("float64" if group == "spmv" else "float16" if gpu else "float32",)
    if group == "gemm":
        sizes, blocks = choice.sizes or ((8192,) if gpu else (1024,)), choice.blocks or (64,)
        for n, b, d, N, kind in product(
            sizes, blocks, choice.densities or (0.22,), choice.columns or ((8192,) if gpu else (128,)), kinds
        ):
            yield _product(group, n, b, d, N, kind)
    elif group == "spmv":
        for b, kind, N in product(choice.blocks or (3,), kinds, choice.columns or (1,)):
            # a size that was asked for without a block is rounded down to whole blocks
            sizes = choice.sizes if choice.blocks else tuple(n - n % b for n in choice.sizes)
            for n in sizes or ((300_000 if gpu else 30_000) * b,):
                for d in choice.densities or (27 * b / n,):
                    yield _product(group, n, b, d, N, kind)
    elif group == "attention":
        size = (choice.blocks or (128 if gpu else 64,))[0]
        for S, kind in product(choice.sizes or (16384 if gpu else 1024,), kinds):
            few = (1, 16 if gpu else 4, S, 128)
            if not choice.densities:
                yield Attention(*few, dtype=kind)
                yield Attention(*few, causal=True, dtype=kind)
            for d in choice.densities:
                yield Attention(*few, blocks=(size, max(1, round(d * S / size))), dtype=kind)
    else:
        for S, kind in product(choice.sizes or (8192 if gpu else 1024,), kinds):
            yield Decode(1, S, dtype=kind)


def _usual(group: str, place: str, quick: bool) -> Iterator[Problem]:
    if place == "cuda":
        yield from {"gemm": _gemm, "spmv": _spmv, "attention": _attention, "decode": _decode}[group](quick)
    else:
        yield from _on_cpu(group, quick)


def _gemm(quick: bool) -> Iterator[Problem]:
    """Block sizes, kinds of numbers; then densities, columns of B and sizes."""
    for b in (128, 64, 32, 16):
        yield _product("gemm", 8192, b, 0.22, 8192, "float16")
    yield _product("gemm", 4096, 32, 0.22, 4096, "float64")
    if quick:
        return
    yield _product("gemm", 8192, 64, 0.22, 8192, "bfloat16")
    yield _product("gemm", 8192, 128, 0.22, 8192, "e4m3")
    yield _product("gemm", 8192, 32, 0.22, 8192, "tf32")
    yield _product("gemm", 8192, 32, 0.22, 8192, "float32")
    for b, d in product((128, 64, 32, 16), (0.05, 0.1, 0.35, 0.5, 0.65, 0.8, 1.0)):
        yield _product("gemm", 8192, b, d, 8192, "float16")
    for b, N in product((128, 64), (16, 64, 256, 1024, 32768)):
        yield _product("gemm", 8192, b, 0.22, N, "float16")
    for n, d, N in ((4096, 0.22, 4096), (16384, 0.10, 16384), (32768, 0.05, 8192)):
        yield _product("gemm", n, 128, d, N, "float16")


def _spmv(quick: bool, rows: int = 300_000) -> Iterator[Problem]:
    """27 blocks a row, as a second-order stencil in space has; a vector, then 16 of them."""
    blocks = (3, 4, 6) if quick else (*range(1, 9), 10, 12, 16)
    for kind, b in product(("float64",) if quick else ("float64", "float32"), blocks):
        yield _product("spmv", rows * b, b, 27 / rows, 1, kind)
    for b in (3,) if quick else (3, 4, 6):
        yield _product("spmv", rows * b, b, 27 / rows, 16, "float64")


def _attention(quick: bool) -> Iterator[Problem]:
    """The four masks at 16K; then lengths, heads of other sizes and other kinds of numbers."""
    long = (1, 16, 16384, 128)
    yield Attention(*long)
    yield Attention(*long, causal=True)
    yield Attention(*long, window=2048)
    yield Attention(*long, blocks=(128, 26))
    if quick:
        return
    yield Attention(*long, causal=True, dtype="bfloat16")
    yield Attention(*long, dtype="e4m3")
    yield Attention(1, 32, 8192, 128, causal=True, kv_heads=8)
    yield Attention(1, 32, 16384, 64, causal=True)
    yield Attention(1, 16, 8192, 256, causal=True)
    yield Attention(1, 128, 512, 64)
    for S in (4096, 8192, 32768, 65536):
        yield Attention(1, 16, S, 128, causal=True)
        yield Attention(1, 16, S, 128, window=2048)
        yield Attention(1, 16, S, 128, blocks=(128, max(1, S // 128 // 5)))


def _decode(quick: bool) -> Iterator[Problem]:
    yield Decode(1, 8192)
    yield Decode(32, 8192)
    if not quick:
        yield Decode(1, 131072)
        yield Decode(32, 8192, page=64)


def _on_cpu(group: str, quick: bool) -> Iterator[Problem]:
    """The same in small."""
    if group == "gemm":
        for b in (64, 32, 16):
            yield _product("gemm", 1024, b, 0.22, 128, "float32")
        yield _product("gemm", 1024, 64, 0.22, 128, "float16")
        yield _product("gemm", 1024, 32, 0.22, 128, "float64")
        if not quick:
            for b, d in product((64, 32, 16), (0.05, 0.1, 0.5, 1.0)):
                yield _product("gemm", 1024, b, d, 128, "float32")
            for N in (16, 64, 512):
                yield _product("gemm", 1024, 32, 0.22, N, "float32")
    elif group == "spmv":
        for b in (3, 4) if quick else (1, 2, 3, 4, 5, 6, 8):
            yield _product("spmv", 30_000 * b, b, 27 / 30_000, 1, "float64")
        yield _product("spmv", 90_000, 3, 27 / 30_000, 16, "float64")
    elif group == "attention":
        for S in (512,) if quick else (256, 512, 1024):
            yield Attention(1, 4, S, 64, dtype="float32")
            yield Attention(1, 4, S, 64, causal=True, dtype="float32")
            yield Attention(1, 4, S, 64, window=128, dtype="float32")
            yield Attention(1, 4, S, 64, blocks=(32, max(1, S // 32 // 5)), dtype="float32")
    else:
        yield Decode(1, 2048)
        if not quick:
            yield Decode(4, 2048, page=64)


# --------------------------------------------------------------------------------------- measuring
@dataclass
class Suite:
    """One run: where, how long, with whom."""

    place: Place
    quick: bool = False
    with_peers: bool = True
    #: a callback that shows a line of progress
    say: Callable[[str], None] = lambda text: None
    rows: list[Row] = field(default_factory=list)
    #: peers that are not installed, in the order in which they were asked
    absent: dict[str, None] = field(default_factory=dict)
    #: records the kernels that are launched, or None
    launched: Launched | None = None

    def __post_init__(self) -> None:
        self.ceilings = Ceilings(self.place, self.quick)

    def meet(self, wanted: Sequence[Problem]) -> None:
        """Call each problem once on zeros, side by side, so that kernels are compiled before anything is timed."""
        if self.place.name == "cpu":
            return
        largest = max((problem.memory for problem in wanted), default=1.0)
        together = int(max(1, min(_SIDE_BY_SIDE, self.place.free_bytes() // (2 * largest))))

        def once(problem: Problem) -> None:
            # An error here occurs again in the measurement, which reports it.
            try:
                if problem.memory <= self.place.free_bytes():
                    problem.ready(self.place, self.place.zeros).call()
            except Exception as error:
                self.say(f"{problem}: {reason_of(error)}")

        with ThreadPoolExecutor(together) as pool:
            list(pool.map(once, wanted))
        self.place.synchronize()
        self.place.release()
        if self.launched is not None:
            self.launched.take()

    def measure(self, problem: Problem) -> Row:
        """Measure one line; an error is a part of the line."""
        row: Row = {
            "group": problem.group, "name": str(problem), **problem.parameters(),
            "flops": problem.flops, "traffic": problem.traffic, "seconds": None, "peers": {},
        }  # fmt: skip
        self.rows.append(row)
        needed, free = problem.memory, self.place.free_bytes()
        if needed > free:
            row["failed"] = f"needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
            return row
        try:
            self._fill(row, problem)
        except Exception as error:
            row["failed"] = reason_of(error)
        finally:
            gc.collect()
            self.place.release()
            if self.launched is not None:
                row["kernels"] = self.launched.take()
        return row

    def _fill(self, row: Row, problem: Problem) -> None:
        self.say("operands")
        ready = problem.ready(self.place, self.place.normal)
        self.say("checking")
        row["error"] = ready.error(ready.call())
        if not row["error"] <= 1:
            row["wrong"] = True
            return
        calls = {"": ready.call} | self._peer_calls(row, ready)

        def failed(name: str, error: Exception) -> None:
            if not name:
                raise error
            row["peers"][name] = {"failed": reason_of(error)}

        self.say("timing")
        rounds = self.place.clock(self.quick).rounds(calls, failed)
        ours = Timing.of([x for found in rounds for x in found[""]])
        row |= asdict(ours) | {
            "tflops": problem.flops / ours.seconds / 1e12,
            "gbps": problem.traffic / ours.seconds / 1e9,
        }
        if not self.quick:
            row["sustained"] = self.place.sustained(ready.call)
        least = self.ceilings.least_seconds(problem.computed_in, problem.flops, problem.traffic)
        row["of_roofline"] = None if least is None else least / ours.seconds
        for name in rounds[0]:
            if name:
                theirs = Timing.of([x for found in rounds for x in found[name]])
                # of each round by itself: what slows a machine down slows all of a round down
                ratios = sorted(median(found[name]) / median(found[""]) for found in rounds)
                shares = {"ratio": median(ratios), "ratio_low": ratios[0], "ratio_high": ratios[-1]}
                row["peers"][name] = asdict(theirs) | shares

    def _peer_calls(self, row: Row, ready: Ready) -> dict[str, Call]:
        """The calls of the peers that are installed and correct; the row says why the others are missing."""
        calls = {}
        for name, make in ready.peers.items() if self.with_peers else ():
            if self.quick and name in SLOW_PEERS:
                continue
            self.say(f"preparing {name}")
            try:
                peer: Peer = make()
                off = (peer.error or ready.error)(peer.call())
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
