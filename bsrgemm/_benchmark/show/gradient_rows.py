"""Tables of the gradients of attention."""

from __future__ import annotations

from .markdown import Row, back_to_back, listed, number, verdict

_IN_ORDER, _ANY_ORDER = "bsrgemm", "bsrgemm, any order"
_PORTABLE = "bsrgemm, portable, any order"
#: Columns of a table: a candidate, and its heading.
_SHOWN = {
    _IN_ORDER: "bsrgemm",
    _ANY_ORDER: "any order",
    "FA4, deterministic": "FA4 in order",
    "FA4": "FA4 any order",
    "cuDNN": "cuDNN",
    "cuDNN BSA": "cuDNN BSA",
    _PORTABLE: "portable, any order",
    "flash2": "flash2",
}
#: By case: a candidate, what it is compared with, and the least ratio; or the least TFLOP/s.
_WANTED: dict[str, tuple[tuple[str, str, float], ...]] = {
    "full 16K": ((_IN_ORDER, "FA4, deterministic", 0.95), (_ANY_ORDER, "FA4", 0.98)),
    "causal 16K": ((_IN_ORDER, "FA4, deterministic", 0.95), (_ANY_ORDER, "FA4", 0.97), (_PORTABLE, "flash2", 0.95)),
    "window 2048 16K": ((_IN_ORDER, "FA4", 1.05),),
    "window 2048 128K": ((_IN_ORDER, "TFLOP/s", 560),),
    "128-blocks .2 16K": ((_IN_ORDER, _ANY_ORDER, 0.85), (_ANY_ORDER, "cuDNN BSA", 1.05)),
    "64-blocks .2 16K": ((_ANY_ORDER, "cuDNN BSA", 1.0),),
    "full 4 x 4096": ((_ANY_ORDER, "FA4", 0.97),),
    "causal 4 x 4096": ((_ANY_ORDER, "FA4", 0.97),),
    "causal 32:8 8192": ((_ANY_ORDER, "FA4", 0.97),),
    "full 16K D 64": ((_ANY_ORDER, "FA4", 0.95),),
    "causal 16K D 64": ((_ANY_ORDER, "FA4", 0.95),),
    "causal 8192 D 256": ((_IN_ORDER, "cuDNN", 1.0),),
}
#: The largest share of the kernels before and after the products, on a window.
_MOST_SHARE = {"window 2048 16K": 0.075}


def rates(found: list[Row]) -> str:
    """Ours and the peers' TFLOP/s, and every ratio that was wanted."""
    names = [name for name in _SHOWN if any(name in row["rates"] for row in found)]
    header = ["case", *(_SHOWN[name] for name in names), "wanted", "got", "reached"]

    def cells(row: Row) -> list[str]:
        of = row["rates"]
        judged = [
            (f"{_SHOWN[ours]} {least:g} {'' if peer == 'TFLOP/s' else 'x '}{_SHOWN.get(peer, peer)}", got, least)
            for ours, peer, least in _WANTED.get(row["case"], ())
            if ours in of and (peer == "TFLOP/s" or peer in of)
            for got in (of[ours] / (1 if peer == "TFLOP/s" else of[peer]),)
        ]
        return [
            *(number(of.get(name)) for name in names),
            ", ".join(text for text, _, _ in judged),
            ", ".join(number(got, 0 if least > 10 else 2) for _, got, least in judged),
            ", ".join(verdict(got >= least) for _, got, least in judged),
        ]

    return listed(found, header, lambda row: row["case"], cells)


def whole(found: list[Row]) -> str:
    """Milliseconds of both passes, the share of the kernels around the products, and memory."""
    header = ["case", "forward", "backward", "both", "TFLOP/s", "begin, us", "end, us", "share of backward", "at most",
              "reached", "MB beside the gradients", "of dq and statistics in float32"]  # fmt: skip

    def cells(row: Row) -> list[str]:
        times, parts, most = row["seconds"], row["parts"], _MOST_SHARE.get(row["case"])
        return [
            *(number(times[name] * 1e3, 2) for name in ("forward", "backward", "both")),
            number(row["rates"]["both"]),
            *(number(parts[name] * 1e6) for name in ("begin", "end")),
            f"{100 * row['share']:.1f} %",
            f"{100 * most:g} %" if most else "",
            verdict(row["share"] <= most) if most else "",
            number(row["peak_bytes"] / 1e6, 1),
            number(row["peak_bytes"] / row["least_bytes"], 2),
        ]

    text = listed(found, header, lambda row: row["case"], cells)
    return text + back_to_back([f"{row['case']} {row['sustained']:.0f}" for row in found])


def errors(found: list[Row]) -> str:
    """Errors of dq, dk and dv, each beside the smallest of the peers."""
    header = ["inputs", "dq", "dk", "dv", "dq, dk, dv over the best peer's", "at most 1.2"]

    def cells(row: Row) -> list[str]:
        ours, over = row["errors"]["bsrgemm"], row["ratios"]
        each = [f"{ours[name]:.1e}" if name in ours else "0" for name in ("dq", "dk", "dv")]
        return [*each, ", ".join(number(over.get(name), 2) for name in ("dq", "dk", "dv")), verdict(row["reached"])]

    def name(row: Row) -> str:
        return f"{row['inputs']}, {row['dtype']}, {'causal' if row['causal'] else 'full'}"

    return listed(found, header, name, cells)
