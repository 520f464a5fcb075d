"""Tables of attention, of host times and of a whole model."""

from __future__ import annotations

from typing import Any

from .bounds import MOST_BYTES, MOST_COST, MOST_ERROR, MOST_START
from .markdown import Row, back_to_back, best, listed, number, pair, peer_names, ratio, size, verdict

_SHOWN = ("cuDNN", "flash", "FA3", "FA4", "cuDNN BSA", "Flex")


def attention_name(row: Row) -> str:
    """An attention in words."""
    what = f"{', '.join(map(str, row['shape']))}, {row['mask']}"
    what += "" if row["dtype"] == "float16" else f", {row['dtype']}"
    return what + (f", on {row['kernel']}" if row["kernel"] else "")


def attention_peers(found: list[Row]) -> list[str]:
    """The peers that occur in at least one of these rows."""
    return [name for name in _SHOWN if any(row.get("peers", {}).get(name) for row in found)]


def attention(found: list[Row]) -> str:
    """Ours, the peers, the two ratios, and every target that could be judged."""
    names = attention_peers(found)
    header = ["B, H, S, D", "bsrgemm", *names, "cF", "over best peer", "over cF", "target", "reached"]

    def cells(row: Row) -> list[str]:
        peers, ours = row["peers"], row["tflops"]
        judged = [t for t in row["targets"] if t["reached"] is not None]
        targets = ", ".join(
            f"{t['least']:g} TFLOP/s" if t["of"] == "TFLOP/s" else f"{t['least']:g} x {t['of']}" for t in judged
        )
        rates = [number(ours), *(number(peers.get(name)) for name in names), number(peers.get("cF"))]
        ratios = [ratio(ours, best(peers, ["cF"])), ratio(ours, peers.get("cF"))]
        return [*rates, *ratios, targets, ", ".join(verdict(t["reached"]) for t in judged)]

    text = listed(found, header, attention_name, cells)
    open_ = sorted({t["of"] for row in found for t in row.get("targets", ()) if t["reached"] is None})
    if open_:
        text += f"\n\nNot judged where it could not be run: targets against {', '.join(open_)}."
    return f"{text}{sustained_attention(found)}"


def sustained_attention(found: list[Row]) -> str:
    """The sustained rates (calls back to back) as a line after a table."""

    def rates(row: Row) -> str:
        return ", ".join(f"{name} {x:.0f}" for name, x in row["sustained"].items())

    return back_to_back([f"{row['mask']} {rates(row)}" for row in found if row.get("sustained")])


def small(found: list[Row]) -> str:
    """Microseconds a head."""
    names = peer_names(found)
    header = ["(1, H, 512, 64), full", "bsrgemm", *names, "over best peer", "at most", "reached"]

    def cells(row: Row) -> list[str]:
        ours, peers = row["us_per_head"], row["peers"]
        fastest = min((x[0] for x in peers.values() if x and x[0]), default=None)
        theirs = [pair(a, b, 2) for a, b in (peers.get(name) or (None, None) for name in names)]
        bound = number(row["bound"], 2) if row["bound"] else ""
        both = pair(ours, row["us_per_head_back_to_back"], 2)
        return [both, *theirs, ratio(fastest, ours), bound, verdict(row["reached"])]

    return listed(found, header, lambda row: f"H = {row['heads']}", cells)


def decode(found: list[Row]) -> str:
    """Microseconds of one token."""
    names = peer_names(found)
    header = ["sequences x keys", "bsrgemm", "TB/s of K and V", *names, "at most", "reached"]

    def what(row: Row) -> str:
        pages = f", pages of {row['page']}" if row["page"] else ""
        blocks = f", {row['blocks']} of {row['of_blocks']} blocks of 64" if "blocks" in row else ""
        return f"{row['batch']} x {row['keys']}{pages}{blocks}"

    def cells(row: Row) -> list[str]:
        if "blocks" in row:
            return [number(row["us"], 1), f"{row['speed_up']:.1f} x faster than all", *[""] * (len(names) + 2)]
        peers = [number(row["peers"].get(name), 1) if row["peers"] else "" for name in names]
        ours, bound = pair(row["us"], row["us_back_to_back"], 1), number(row["bound"], 1) if row["bound"] else ""
        return [ours, number(row["tb_per_second"], 2), *peers, bound, verdict(row["reached"])]

    return listed(found, header, what, cells)


def long(found: list[Row]) -> str:
    """Long sequences beside dense causal attention."""
    header = ["tokens, mask", "ms", "TFLOP/s", "extra MB", "at most 2", "faster than dense causal", "dense time"]

    def cells(row: Row) -> list[str]:
        if isinstance(row["seconds"], dict):
            times = ", ".join(f"{name} {x * 1e3:.1f}" for name, x in row["seconds"].items())
            return [times, "", "", "", "", "measured"]
        extra = None if row["peak_bytes"] is None else (row["peak_bytes"] + row["mask_bytes"]) / 1e6
        few = verdict(None if extra is None else extra * 1e6 <= MOST_BYTES)
        faster = ", ".join(f"{x:.1f} x {name}" for name, x in row["speed_up"].items())
        ours = [number(row["seconds"] * 1e3, 2), number(row["tflops"]), number(extra, 2)]
        return [*ours, few, faster, "computed" if row["dense_computed"] else "measured"]

    return listed(found, header, lambda row: f"{size(row['length'])}, {row['mask']}", cells)


def density(found: list[Row]) -> str:
    """Time by density, and the line through it."""
    header = ["density", "ms", "over density x full", "at most 1.10 of that and 20 us"]

    def cells(row: Row) -> list[str]:
        reached = row["seconds"] <= MOST_COST * row["density"] * row["full_seconds"] + MOST_START
        return [number(row["seconds"] * 1e3, 3), number(row["ratio"], 2), verdict(reached)]

    text = listed([row for row in found if "slope" not in row], header, lambda row: f"{row['density']:.3f}", cells)
    for row in found:
        if "slope" in row:
            text += f"\n\nFit: {row['slope']:.3f} x density x full + {row['start_seconds'] * 1e6:.0f} us."
    return text


def accuracy(found: list[Row]) -> str:
    """Errors beside the smallest of the peers."""
    header = ["inputs", "bsrgemm", "best peer", "ratio", "at most 1.2", "time over plain inputs"]

    def cells(row: Row) -> list[str]:
        ours = row["errors"]["bsrgemm"]
        others = {name: x["error"] for name, x in row["errors"].items() if name != "bsrgemm"}
        peer = min(others, key=others.__getitem__, default=None)
        shown = "-" if peer is None else f"{others[peer]:.1e} ({peer})"
        over = None if peer is None or not others[peer] else ours["error"] / others[peer]
        reached = None if over is None else over <= MOST_ERROR
        return [f"{ours['error']:.1e}", shown, number(over, 2), verdict(reached), number(ours["slower"], 2)]

    return listed(found, header, lambda row: f"{row['inputs']}, {row['dtype']}", cells)


# ------------------------------------------------------------------------------------------ calls
#: Field of a row -> (what it is, unit, scale)
_COSTS: dict[str, tuple[str, str, float]] = {
    "host_seconds": ("{what}, host time", "us", 1e6),
    "call_seconds": ("{kernel}, host time of a call", "us", 1e6),
    "cold_seconds": ("{kernel}, first call, cold cache", "ms", 1e3),
    "warm_seconds": ("{kernel}, first call, warm cache", "ms", 1e3),
    "prepare_seconds": ("work list of 1,000,000 blocks of {block} x {block}", "ms", 1e3),
}


def _adds(row: Row) -> str:
    """A host time as a multiple of that of cupy.add, if that was measured."""
    return f" ({row['adds']:.1f} x cupy.add)" if row.get("adds") else ""


def overhead(found: list[Row]) -> str:
    """A line for each cost; old files have no bounds in them."""

    def kind(row: Row) -> str:
        return next(name for name in _COSTS if name in row)

    def cells(row: Row) -> list[str]:
        name = kind(row)
        _, unit, scale = _COSTS[name]
        most = f"{row['bound'] * scale:g} {unit}" if row.get("bound") else ""
        if row.get("most_adds"):
            most = f"{row['most_adds']:g} x cupy.add"
        return [f"{row[name] * scale:.1f} {unit}{_adds(row)}", most, verdict(row.get("reached"))]

    return listed(found, ["", "bsrgemm", "at most", "reached"], lambda row: _COSTS[kind(row)][0].format(**row), cells)


def host(found: list[Row]) -> str:
    """Host times of attention, and what masks cost."""

    def what(row: Row) -> str:
        masks = "make_seconds" in row
        return f"mask: {row['what'].replace('|', 'or')}, made + listed" if masks else str(row["what"])

    def cells(row: Row) -> list[str]:
        if "make_seconds" in row:
            made = f"{row['make_seconds'] * 1e3:.2f} + {row['list_seconds'] * 1e3:.2f} ms, {row['nbytes'] / 1e6:.2f} MB"
            return [made, "" if row["reached"] is None else "1 ms, 1 MB", verdict(row["reached"])]
        most = f"{row['bound'] * 1e6:.0f} us" if row["bound"] else ""
        return [f"{row['seconds'] * 1e6:.1f} us{_adds(row)}", most, verdict(row["reached"])]

    return listed(found, ["", "bsrgemm", "at most", "reached"], what, cells)


# ------------------------------------------------------------------------------------------ llama
def _way(row: Row) -> str:
    """How tokens were made, or by what the dense layers of a prompt were; runs until November 2026 do not say it."""
    names = {"launched": "kernel by kernel", "graph": "by a CUDA graph"}
    by = row.get("by")
    return "" if by is None else f", {names[by]}" if by in names else f", dense layers by {by}"


def llama(found: list[Row]) -> str:
    """Tokens a second, and the share of attention."""
    names: dict[str, Any] = {
        "logits": lambda row: f"logits against plain attention, {row['layers']} layers{_way(row)}",
        "prefill": lambda row: f"prefill of {row['tokens']} tokens{_way(row)}",
        "decode": lambda row: f"decode of {row['tokens']} tokens{_way(row)}",
        "kv heads": lambda row: (
            f"keys and values {row['kv_bytes'] / 1e9:.2f} GB (repeated {row['repeated_kv_bytes'] / 1e9:.2f}), "
            "attention of a layer"
        ),
    }

    def cells(row: Row) -> list[str]:
        if row["what"] == "logits":
            off = f"largest difference {row['largest']:.1e}, root mean square {row['mean']:.1e} of their spread"
            return [off, verdict(row["good"])]
        if row["what"] == "kv heads":
            return [", ".join(f"{name} {x * 1e3:.2f} ms" for name, x in row["layer_seconds"].items()), ""]
        digits = 0 if row["what"] == "prefill" else 1
        return [f"{row['tokens_per_second']:,.{digits}f} tokens/s", f"{row['attention_share']:.0%}"]

    return listed(found, ["", "", "attention's share, or good"], lambda row: names[row["what"]](row), cells)
