"""Rows of bench/results/*.json as compact Markdown tables, one function for each kind of file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .bounds import MOST_BYTES, MOST_COST, MOST_ERROR, MOST_START

Row = dict[str, Any]
_PEERS = ("cuSPARSE BSR", "cuSPARSE ELL", "torch BSR")
_UNITS = {"cuBLAS": " x cuBLAS", "TFLOP/s": " TFLOP/s", "float16": " x float16"}


# ------------------------------------------------------------------------------------------ cells
def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    ruler = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ruler, *lines])


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def ratio(a: float | None, b: float | None) -> str:
    return "-" if a is None or not b else f"{a / b:.2f}"


def verdict(reached: bool | None) -> str:
    """Plainly yes or no; nothing where there is no target."""
    return {True: "yes", False: "**no**", None: ""}[reached]


def pair(a: float | None, b: float | None, digits: int) -> str:
    return number(a, digits) if b is None else f"{number(a, digits)} / {number(b, digits)}"


def failure(row: Row) -> str | None:
    """Why there is no number, if there is none."""
    if row.get("wrong"):
        return f"**WRONG**, off by {row.get('deviation', float('nan')):.1e}"
    return "**failed**" if row.get("failed") or row.get("seconds", 0) is None else None


def bad(row: Row, what: str, width: int) -> list[str]:
    """The line of a row without numbers."""
    return [what, failure(row) or "", *[""] * (width - 2)]


def best(peers: dict[str, float | None], without: Sequence[str] = ()) -> float | None:
    return max((x for name, x in peers.items() if x is not None and name not in without), default=None)


def size(n: int) -> str:
    return f"{n // 1024}K" if n % 1024 == 0 and n >= 16384 else str(n)


# ------------------------------------------------------------------------------------------- gemm
def _product(row: Row) -> str:
    R, C = row["block"]
    parts = [f"{row['precision'] or row['dtype']}, {R} x {C}, density {row['density']:.2f}"]
    if row["dtype"] == "e4m3":
        parts.append("cuBLAS in float16")
    n, N = row["n"], row["columns"]
    if (n, N) != (8192, 8192):
        parts.append(f"n = {size(n)}" if n == N else f"n = {size(n)}, {N} columns")
    if row["pattern"] != "uniform":
        parts.append(row["pattern"])
    if row["kernel"]:
        parts.append(f"on {row['kernel']}")
    return ", ".join(parts)


def products(found: list[Row]) -> str:
    """Ours, dense cuBLAS, the peers and the target; then what is left when run back to back."""
    with_peers = any(row.get("peers") for row in found)
    shown = _PEERS if with_peers else ()
    header = ["n = 8192, 8192 columns unless said", "bsrgemm", "dense cuBLAS", "ratio"]
    header += [*(["cuSPARSE BSR", "Blocked-ELL", "torch"] if with_peers else []), "target", "reached"]
    lines = []
    for row in found:
        if failure(row):
            lines.append(bad(row, row.get("what") or _product(row), len(header)))
            continue
        target = f"{row['target']:g}{_UNITS[row['target_of']]}" if row.get("target") else ""
        rates = [number(row["tflops"]), number(row["dense_tflops"]), number(row["ratio"], 2)]
        peers = [number(row["peers"].get(name)) if row["peers"] else "" for name in shown]
        lines.append([_product(row), *rates, *peers, target, verdict(row.get("reached"))])
    text = table(header, lines)
    sustained = [
        f"{row['block'][0]} x {row['block'][1]} {row['sustained']:.0f} of {number(row['dense_sustained'])}"
        for row in found
        if row.get("sustained")
    ]
    return f"{text}\n\nBack to back, at the power limit: {', '.join(sustained)}." if sustained else text


def crossovers(found: list[Row]) -> str:
    header = ["block", "time over dense at density", "sparse wins below", "target", "reached"]
    lines = []
    for block in dict.fromkeys(row["block"] for row in found if "block" in row):
        own = [row for row in found if row.get("block") == block]
        ratios = ", ".join(f"{row['density']:.2f}: {row['ratio']:.2f}" for row in own if "ratio" in row)
        for row in own:
            if "target" in row:
                below = "every density" if row["crossover"] is None else f"{row['crossover']:.2f}"
                lines.append([f"{block} x {block}", ratios, below, f"{row['target']:.2f}", verdict(row["reached"])])
                break
        else:
            lines.append([f"{block} x {block}", ratios, "-", "", ""])
    lines += [bad(row, row["what"], len(header)) for row in found if "what" in row]
    return table(header, lines)


def relative(found: list[Row]) -> str:
    header = ["", "ms", "relative rate", "target", "reached"]
    return table(
        header,
        [
            bad(row, row["what"], len(header))
            if failure(row)
            else [row["what"], number(row["seconds"] * 1e3, 3), number(row["relative"], 2),
                  number(row["target"], 2) if row["target"] else "", verdict(row["reached"])]
            for row in found
        ],
    )  # fmt: skip


def errors(found: list[Row]) -> str:
    return table(
        ["", "bsrgemm", "dense cuBLAS", "ratio", "at most", "kept"],
        [
            bad(row, row["what"], 6)
            if failure(row)
            else [f"{row['precision'] or row['dtype']}, {row['block']} x {row['block']}", f"{row['error']:.1e}",
             f"{row['dense_error']:.1e}", number(row["ratio"], 2), f"{row['limit']:g}", verdict(row["reached"])]
            for row in found
        ],
    )  # fmt: skip


def columns(found: list[Row]) -> str:
    good = [row for row in found if "columns" in row]
    blocks = list(dict.fromkeys(row["block"] for row in good))
    by = {(row["block"], row["columns"]): row for row in good}
    header = ["columns of B", *(f"{b} x {b}: {unit}" for b in blocks for unit in ("TFLOP/s", "GB/s"))]
    lines = []
    for N in dict.fromkeys(row["columns"] for row in good):
        cells = [by.get((b, N), {}) for b in blocks]
        pairs = [(number(row.get("tflops"), 1), number(row.get("gbps"))) for row in cells]
        lines.append([str(N), *(x for both in pairs for x in both)])
    lines += [bad(row, row["what"], len(header)) for row in found if "what" in row]
    return table(header, lines)


# -------------------------------------------------------------------------------------- attention
def attention(found: list[Row]) -> str:
    """Ours, the peers, the two ratios, and every target that could be judged."""
    names = [n for n in ("cuDNN", "flash", "FA4", "Flex") if any(row.get("peers", {}).get(n) for row in found)]
    header = ["B, H, S, D", "bsrgemm", *names, "cF", "over best peer", "over cF", "target", "reached"]
    lines = []
    for row in found:
        if "what" in row:
            lines.append(bad(row, row["what"], len(header)))
            continue
        what = f"{', '.join(map(str, row['shape']))}, {row['mask']}"
        what += "" if row["dtype"] == "float16" else f", {row['dtype']}"
        what += f", on {row['kernel']}" if row["kernel"] else ""
        if failure(row):
            lines.append(bad(row, what, len(header)))
            continue
        peers, ours = row["peers"], row["tflops"]
        judged = [t for t in row["targets"] if t["reached"] is not None]
        targets = ", ".join(
            f"{t['least']:g} TFLOP/s" if t["of"] == "TFLOP/s" else f"{t['least']:g} x {t['of']}" for t in judged
        )
        rates = [number(ours), *(number(peers.get(name)) for name in names), number(peers.get("cF"))]
        ratios = [ratio(ours, best(peers, ["cF"])), ratio(ours, peers.get("cF"))]
        lines.append([what, *rates, *ratios, targets, ", ".join(verdict(t["reached"]) for t in judged)])
    text = table(header, lines)
    open_ = sorted({t["of"] for row in found for t in row.get("targets", ()) if t["reached"] is None})
    if open_:
        text += f"\n\nNot judged where it could not be run: targets against {', '.join(open_)}."
    sustained = [
        f"{row['mask']} {', '.join(f'{name} {x:.0f}' for name, x in row['sustained'].items())}"
        for row in found
        if row.get("sustained")
    ]
    return f"{text}\n\nBack to back, at the power limit: {'; '.join(sustained)}." if sustained else text


def small(found: list[Row]) -> str:
    good = [row for row in found if "heads" in row]
    names = list(dict.fromkeys(name for row in good for name in row["peers"]))
    header = ["(1, H, 512, 64), full", "bsrgemm", *names, "over best peer", "at most", "reached"]
    lines = []
    for row in good:
        ours, peers = row["us_per_head"], row["peers"]
        fastest = min((x[0] for x in peers.values() if x and x[0]), default=None)
        cells = [pair(a, b, 2) for a, b in (peers.get(name) or (None, None) for name in names)]
        bound = number(row["bound"], 2) if row["bound"] else ""
        lines.append(
            [f"H = {row['heads']}", pair(ours, row["us_per_head_back_to_back"], 2), *cells, ratio(fastest, ours), bound,
             verdict(row["reached"])]
        )  # fmt: skip
    lines += [bad(row, row["what"], len(header)) for row in found if "what" in row]
    return table(header, lines)


def decode(found: list[Row]) -> str:
    good = [row for row in found if "keys" in row]
    names = list(dict.fromkeys(name for row in good for name in row.get("peers", {})))
    header = ["sequences x keys", "bsrgemm", "TB/s of K and V", *names, "at most", "reached"]
    lines = []
    for row in good:
        what = f"{row['batch']} x {row['keys']}" + (f", pages of {row['page']}" if row["page"] else "")
        if "blocks" in row:
            what += f", {row['blocks']} of {row['of_blocks']} blocks of 64"
            faster = f"{row['speed_up']:.1f} x faster than all"
            lines.append([what, number(row["us"], 1), faster, *[""] * (len(names) + 2)])
            continue
        peers = [number(row["peers"].get(name), 1) if row["peers"] else "" for name in names]
        ours, bound = pair(row["us"], row["us_back_to_back"], 1), number(row["bound"], 1) if row["bound"] else ""
        lines.append([what, ours, number(row["tb_per_second"], 2), *peers, bound, verdict(row["reached"])])
    lines += [bad(row, row["what"], len(header)) for row in found if "what" in row]
    return table(header, lines)


def long(found: list[Row]) -> str:
    header = ["tokens, mask", "ms", "TFLOP/s", "extra MB", "at most 2", "faster than dense causal", "dense time"]
    lines = []
    for row in found:
        if "length" not in row:
            lines.append(bad(row, row.get("what", ""), len(header)))
        elif isinstance(row["seconds"], dict):
            times = ", ".join(f"{name} {x * 1e3:.1f}" for name, x in row["seconds"].items())
            lines.append([f"{size(row['length'])}, {row['mask']}", times, "", "", "", "", "measured"])
        else:
            extra = None if row["peak_bytes"] is None else (row["peak_bytes"] + row["mask_bytes"]) / 1e6
            small = verdict(None if extra is None else extra * 1e6 <= MOST_BYTES)
            faster = ", ".join(f"{x:.1f} x {name}" for name, x in row["speed_up"].items())
            lines.append(
                [f"{size(row['length'])}, {row['mask']}", number(row["seconds"] * 1e3, 2), number(row["tflops"]),
                 number(extra, 2), small, faster, "computed" if row["dense_computed"] else "measured"]
            )  # fmt: skip
    return table(header, lines)


def density(found: list[Row]) -> str:
    good = [row for row in found if "density" in row]
    header = ["density", "ms", "over density x full", "at most 1.10 of that and 20 us"]
    lines = []
    for row in good:
        reached = row["seconds"] <= MOST_COST * row["density"] * row["full_seconds"] + MOST_START
        cells = [number(row["seconds"] * 1e3, 3), number(row["ratio"], 2), verdict(reached)]
        lines.append([f"{row['density']:.3f}", *cells])
    lines += [bad(row, row["what"], len(header)) for row in found if "what" in row]
    text = table(header, lines)
    fits = [row for row in found if "slope" in row]
    for row in fits:
        text += f"\n\nFit: {row['slope']:.3f} x density x full + {row['start_seconds'] * 1e6:.0f} us."
    return text


def accuracy(found: list[Row]) -> str:
    header = ["inputs", "bsrgemm", "best peer", "ratio", "at most 1.2", "time over plain inputs"]
    lines = []
    for row in found:
        if "errors" not in row:
            lines.append(bad(row, row.get("what", ""), len(header)))
            continue
        ours = row["errors"]["bsrgemm"]
        others = {name: x["error"] for name, x in row["errors"].items() if name != "bsrgemm"}
        peer = min(others, key=others.__getitem__, default=None)
        shown = "-" if peer is None else f"{others[peer]:.1e} ({peer})"
        over = None if peer is None or not others[peer] else ours["error"] / others[peer]
        reached = None if over is None else over <= MOST_ERROR
        cells = [f"{ours['error']:.1e}", shown, number(over, 2), verdict(reached), number(ours["slower"], 2)]
        lines.append([f"{row['inputs']}, {row['dtype']}", *cells])
    return table(header, lines)


# ------------------------------------------------------------------------------------------ calls
def overhead(found: list[Row]) -> str:
    """A line for each thing; files before there were bounds in them have none."""
    lines = []
    for row in found:
        bound, reached = row.get("bound"), row.get("reached")
        if "call_seconds" in row:
            what, value, unit, scale = f"{row['kernel']}, host time of a call", row["call_seconds"], "us", 1e6
        elif "cold_seconds" in row:
            what, value, unit, scale = f"{row['kernel']}, first call, cold cache", row["cold_seconds"], "ms", 1e3
        elif "warm_seconds" in row:
            what, value, unit, scale = f"{row['kernel']}, first call, warm cache", row["warm_seconds"], "ms", 1e3
        else:
            what = f"work list of 1,000,000 blocks of {row['block']} x {row['block']}"
            value, unit, scale = row["prepare_seconds"], "ms", 1e3
        most = f"{bound * scale:g} {unit}" if bound else ""
        lines.append([what, f"{value * scale:.1f} {unit}", most, verdict(reached)])
    return table(["", "bsrgemm", "at most", "reached"], lines)


def host(found: list[Row]) -> str:
    lines = []
    for row in found:
        if "make_seconds" in row:
            made = f"{row['make_seconds'] * 1e3:.2f} + {row['list_seconds'] * 1e3:.2f} ms, {row['nbytes'] / 1e6:.2f} MB"
            bound = "" if row["reached"] is None else "1 ms, 1 MB"
            what = row["what"].replace("|", "or")
            lines.append([f"mask: {what}, made + listed", made, bound, verdict(row["reached"])])
        else:
            most = f"{row['bound'] * 1e6:.0f} us" if row["bound"] else ""
            lines.append([row["what"], f"{row['seconds'] * 1e6:.1f} us", most, verdict(row["reached"])])
    return table(["", "bsrgemm", "at most", "reached"], lines)


# ------------------------------------------------------------------------------------------ llama
def llama(found: list[Row]) -> str:
    lines = []
    for row in found:
        if row["what"] == "logits":
            what = f"largest difference {row['largest']:.1e}, root mean square {row['mean']:.1e} of their spread"
            lines.append([f"logits against plain attention, {row['layers']} layers", what, verdict(row["good"])])
        elif row["what"] == "prefill":
            lines.append([f"prefill of {row['tokens']} tokens", f"{row['tokens_per_second']:,.0f} tokens/s",
                          f"{row['attention_share']:.0%}"])  # fmt: skip
        elif row["what"] == "decode":
            lines.append([f"decode of {row['tokens']} tokens", f"{row['tokens_per_second']:,.1f} tokens/s",
                          f"{row['attention_share']:.0%}"])  # fmt: skip
        else:
            times = ", ".join(f"{name} {x * 1e3:.2f} ms" for name, x in row["layer_seconds"].items())
            memory = f"{row['kv_bytes'] / 1e9:.2f} GB (repeated {row['repeated_kv_bytes'] / 1e9:.2f})"
            lines.append([f"keys and values {memory}, attention of a layer", times, ""])
    return table(["", "", "attention's share, or good"], lines)


# ----------------------------------------------------------------------------------------- others
def conversions(found: list[Row]) -> str:
    """Ours on the card, and the way through the host and SciPy."""
    lines = [
        [row["case"], number(row["seconds"] * 1e3, 2), number(row["through_host"] * 1e3),
         f"{row['through_host'] / row['seconds']:.0f} x"]
        for row in found
    ]  # fmt: skip
    return table(["", "bsrgemm, ms", "copied to the host, SciPy, copied back, ms", "faster"], lines)


def _small_blocks(row: Row) -> str:
    R, C = row["block"]
    return f"{R} x {C} {row['dtype']}"


def shares(found: list[Row]) -> str:
    """Bandwidths over that of a copy, and those of peers."""
    peers = list(dict.fromkeys(name for row in found for name in row.get("peers", {})))
    header = ["", "ms", "bsrgemm", *peers, "target", "reached"]
    lines = [
        bad(row, _small_blocks(row), len(header))
        if failure(row)
        else [_small_blocks(row), number(row["seconds"] * 1e3, 3), number(row["share"], 2),
              *(number(row["peers"].get(name), 2) for name in peers),
              number(row["target"], 2) if row["target"] else "", verdict(row["reached"])]
        for row in found
    ]  # fmt: skip
    return table(header, lines)


def milliseconds(found: list[Row]) -> str:
    """Times, those of peers, and what they are to be at most."""
    peers = list(dict.fromkeys(name for row in found for name in row.get("peers", {})))
    header = ["", "bsrgemm, ms", *peers, "at most", "kept"]
    lines = [
        bad(row, _small_blocks(row), len(header))
        if failure(row)
        else [_small_blocks(row), number(row["seconds"] * 1e3, 2),
              *(number(None if row["peers"].get(name) is None else row["peers"][name] * 1e3, 2) for name in peers),
              number(row["target"], 2) if row["target"] else "", verdict(row["reached"])]
        for row in found
    ]  # fmt: skip
    return table(header, lines)


def by_peer(found: list[Row]) -> str:
    """Products beside the fastest of their peers."""
    lines = []
    for row in found:
        R, N = row["block"], row["columns"]
        what = f"n = {row['n']:,}, {row['dtype']}, blocks {R} x {R}, {'a vector' if N == 1 else f'{N} columns'}"
        name, seconds = min(row["peers"].items(), key=lambda peer: peer[1])
        ours = row["seconds"]
        lines.append([what, number(ours * 1e3, 2), f"{name} {seconds * 1e3:.2f}", f"{seconds / ours:.1f} x"])
    return table(["", "bsrgemm, ms", "fastest peer, ms", "faster"], lines)


def sparse_products(found: list[Row]) -> str:
    """A @ A of random blocks: the whole call and its products alone, beside a dense product."""
    header = ["float16, density .22", "ms", "TFLOP/s", "at least", "reached", "dense cuBLAS, ms"]
    lines = []
    for row in found:
        what = f"n = {size(row['n'])}, {row['block'][0]} x {row['block'][1]}, {row['what']}"
        if failure(row):
            lines.append(bad(row, what, len(header)))
            continue
        dense, least = row["peers"].get("cuBLAS"), number(row["target"]) if row["target"] else ""
        lines.append(
            [what, number(row["seconds"] * 1e3, 3), number(row["tflops"]), least, verdict(row["reached"]),
             number(dense and dense * 1e3, 2)]
        )  # fmt: skip
    return table(header, lines)


def mesh_products(found: list[Row]) -> str:
    """A @ A of a mesh beside its peers."""
    peers = list(dict.fromkeys(name for row in found for name in row.get("peers", {})))
    header = ["3 x 3 blocks, float64", "bsrgemm, ms", *(f"{name}, ms" for name in peers), "faster than all", "wanted"]
    lines = []
    for row in found:
        what = f"{row.get('cells')}^3 hexahedra, {row.get('n', 0):,} rows"
        if failure(row):
            lines.append(bad(row, what, len(header)))
            continue
        taken = [row["peers"].get(name) for name in peers]
        wanted = f"{row['target']:.0f} x cupyx csr" if row["target"] else ""
        told = "-" if row["ratio"] is None else f"{row['ratio']:.1f} x"
        lines.append(
            [what, number(row["seconds"] * 1e3, 2), *(number(x and x * 1e3, 2) for x in taken), told,
             f"{wanted} {verdict(row['reached'])}"]
        )  # fmt: skip
    return table(header, lines)


def sampled(found: list[Row]) -> str:
    """Rates of sampled products beside the dense one."""
    header = ["density .22", "ms", "TFLOP/s", "of dense cuBLAS", "at least", "reached", "torch sampled_addmm, TFLOP/s"]
    lines = []
    for row in found:
        what = f"{row['dtype']}, {row['block'][0]} x {row['block'][1]}, Y {row['layout']}-major"
        if failure(row):
            lines.append(bad(row, what, len(header)))
            continue
        lines.append(
            [what, number(row["seconds"] * 1e3, 3), number(row["tflops"], 1), number(row["ratio"], 2),
             number(row["target"], 2) if row["target"] else "", verdict(row["reached"]),
             number(row["peers"].get("torch sampled_addmm"), 2)]
        )  # fmt: skip
    return table(header, lines)


def solvers(found: list[Row]) -> str:
    """Time to 1e-8, its share in products, and peers with the same smoother."""
    header = ["", "iterations", "bsrgemm, ms", "in products", "cupyx csr, ms", "pyamg on the CPU, ms"]
    lines = []
    for row in found:
        what = f"{row['problem']}, {row['unknowns']:,} unknowns, {row['smoother']}"
        if not row.get("good"):
            lines.append([what, "**WRONG**", *[""] * (len(header) - 2)])
            continue
        peers = row["peers"]
        cells = [
            number(peers[name]["seconds"] * 1e3, 1) + f" ({peers[name]['iterations']})" if name in peers else "-"
            for name in ("cupyx csr", "pyamg")
        ]
        inside = f"{row['products']['A, P, R'] / row['seconds']:.0%}"
        lines.append([what, str(row["iterations"]), number(row["seconds"] * 1e3, 1), inside, *cells])
    return table(header, lines)
