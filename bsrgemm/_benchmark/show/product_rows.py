"""Tables of products: dense results, sparse results, small blocks, conversions, solvers."""

from __future__ import annotations

from .markdown import (
    Row,
    back_to_back,
    failure,
    listed,
    marked,
    number,
    peer_names,
    size,
    table,
    target,
    verdict,
)

_PEERS = ("cuSPARSE BSR", "cuSPARSE ELL", "torch BSR")
_UNITS = {"cuBLAS": " x cuBLAS", "TFLOP/s": " TFLOP/s", "float16": " x float16"}


# ------------------------------------------------------------------------------------------- gemm
def product_name(row: Row) -> str:
    """A product in words."""
    R, C = row["block"]
    parts = [f"{row['precision'] or row['dtype']}, {R} x {C}, density {row['density']:.2f}"]
    if row["dtype"] == "e4m3":
        parts.append("cuBLAS in float16")
    n, N = row["n"], row["columns"]
    if (n, N) != (8192, 8192):
        parts.append(f"n = {size(n)}" if n == N else f"n = {size(n)}, {N} columns")
    pattern = str(row["pattern"])
    if pattern != "uniform":
        parts.append({"bernoulli": "each block drawn alone"}.get(pattern, pattern))
    if row["kernel"]:
        parts.append(f"on {row['kernel']}")
    return ", ".join(parts)


def products(found: list[Row]) -> str:
    """Our rate, dense cuBLAS, the peers and the target; then the sustained rates."""
    with_peers = any(row.get("peers") for row in found)
    shown = _PEERS if with_peers else ()
    header = ["n = 8192, 8192 columns unless said", "bsrgemm", "dense cuBLAS", "ratio"]
    header += [*(["cuSPARSE BSR", "Blocked-ELL", "torch"] if with_peers else []), "target", "reached"]

    def cells(row: Row) -> list[str]:
        wanted = f"{row['target']:g}{_UNITS[row['target_of']]}" if row.get("target") else ""
        rates = [number(row["tflops"]), number(row["dense_tflops"]), number(row["ratio"], 2)]
        peers = [number(row["peers"].get(name)) if row["peers"] else "" for name in shown]
        return [*rates, *peers, wanted, verdict(row.get("reached"))]

    text = listed(found, header, product_name, cells)
    return f"{text}{sustained_products(found)}"


def sustained_products(found: list[Row]) -> str:
    """The sustained rates (calls back to back) as a line after a table."""
    rows = [row for row in found if row.get("sustained")]
    sides = ("{} x {}".format(*row["block"]) for row in rows)
    rates = (f"bsrgemm {row['sustained']:.0f}, dense cuBLAS {number(row['dense_sustained'])}" for row in rows)
    return back_to_back([f"{side} {rate}" for side, rate in zip(sides, rates, strict=True)])


def crossovers(found: list[Row]) -> str:
    """Ratios by density, and the density from which on dense is faster."""
    header = ["block", "time over dense at density", "sparse wins below", "target", "reached"]
    lines = []
    for block in dict.fromkeys(row["block"] for row in found if "block" in row):
        own = [row for row in found if row.get("block") == block]
        ratios = ", ".join(marked(row, f"{row['density']:.2f}: {row['ratio']:.2f}") for row in own if "ratio" in row)
        for row in own:
            if "target" in row:
                below = "every density" if row["crossover"] is None else f"{row['crossover']:.2f}"
                lines.append([f"{block} x {block}", ratios, below, f"{row['target']:.2f}", verdict(row["reached"])])
                break
        else:
            lines.append([f"{block} x {block}", ratios, "-", "", ""])
    lines += [[row["what"], failure(row) or "", "", "", ""] for row in found if "what" in row]
    return table(header, lines)


def relative(found: list[Row]) -> str:
    """Rates beside that of a base."""

    def cells(row: Row) -> list[str]:
        times = [number(row["seconds"] * 1e3, 3), number(row["relative"], 2)]
        return [*times, target(row["target"]), verdict(row["reached"])]

    return listed(found, ["", "ms", "relative rate", "target", "reached"], lambda row: str(row["what"]), cells)


def errors(found: list[Row]) -> str:
    """Errors beside those of cuBLAS."""

    def name(row: Row) -> str:
        return f"{row['precision'] or row['dtype']}, {row['block']} x {row['block']}"

    def cells(row: Row) -> list[str]:
        both = [f"{row['error']:.1e}", f"{row['dense_error']:.1e}", number(row["ratio"], 2)]
        return [*both, f"{row['limit']:g}", verdict(row["reached"])]

    return listed(found, ["", "bsrgemm", "dense cuBLAS", "ratio", "at most", "kept"], name, cells)


def columns(found: list[Row]) -> str:
    """Rates and bandwidths by columns of B, a pair of columns for each block."""
    good = [row for row in found if "columns" in row]
    blocks = list(dict.fromkeys(row["block"] for row in good))
    by = {(row["block"], row["columns"]): row for row in good}
    header = ["columns of B", *(f"{b} x {b}: {unit}" for b in blocks for unit in ("TFLOP/s", "GB/s"))]
    lines = []
    for N in dict.fromkeys(row["columns"] for row in good):
        cells = [by.get((b, N), {}) for b in blocks]
        pairs = [(marked(row, number(row.get("tflops"), 1)), number(row.get("gbps"))) for row in cells]
        lines.append([str(N), *(x for both in pairs for x in both)])
    lines += [[row["what"], failure(row) or "", *[""] * (len(header) - 2)] for row in found if "what" in row]
    return table(header, lines)


# ------------------------------------------------------------------------------------ small blocks
def small_block_name(row: Row) -> str:
    R, C = row["block"]
    return f"{R} x {C} {row['dtype']}"


def shares(found: list[Row]) -> str:
    """Bandwidths over that of a copy, and those of peers."""
    peers = peer_names(found)

    def cells(row: Row) -> list[str]:
        theirs = [number(row["peers"].get(name), 2) for name in peers]
        ours = [number(row["seconds"] * 1e3, 3), number(row["share"], 2)]
        return [*ours, *theirs, target(row["target"]), verdict(row["reached"])]

    return listed(found, ["", "ms", "bsrgemm", *peers, "target", "reached"], small_block_name, cells)


def milliseconds(found: list[Row]) -> str:
    """Our times, the times of peers, and the targets."""
    peers = peer_names(found)

    def cells(row: Row) -> list[str]:
        taken = [row["peers"].get(name) for name in peers]
        theirs = [number(None if x is None else x * 1e3, 2) for x in taken]
        return [number(row["seconds"] * 1e3, 2), *theirs, target(row["target"]), verdict(row["reached"])]

    return listed(found, ["", "bsrgemm, ms", *peers, "at most", "kept"], small_block_name, cells)


def by_peer(found: list[Row]) -> str:
    """Products beside the fastest of their peers."""

    def name(row: Row) -> str:
        R, N = row["block"], row["columns"]
        return f"n = {row['n']:,}, {row['dtype']}, blocks {R} x {R}, {'a vector' if N == 1 else f'{N} columns'}"

    def cells(row: Row) -> list[str]:
        peer, seconds = min(row["peers"].items(), key=lambda item: item[1])
        ours = row["seconds"]
        return [number(ours * 1e3, 2), f"{peer} {seconds * 1e3:.2f}", f"{seconds / ours:.1f} x"]

    return listed(found, ["", "bsrgemm, ms", "fastest peer, ms", "faster"], name, cells)


def everyday(found: list[Row]) -> str:
    """Operations on three matrices: our CPU time, and how many times that of the faster of scipy's two formats."""
    names = list(dict.fromkeys(row["matrix"] for row in found))
    by_name = {(row["matrix"], row["what"]): row for row in found}

    def cell(name: str, what: str) -> list[str]:
        row = by_name.get((name, what))
        if row is None:
            return ["-", "-"]
        factor = f"{row['factor']:.2f}"
        return [number(row["seconds"] * 1e6, 1), f"**{factor}**" if row["factor"] > row["most"] else factor]

    one_each = list({row["what"]: row for row in found}.values())
    header = ["", *(part for name in names for part in (f"{name}, us", "over scipy"))]

    def cells(row: Row) -> list[str]:
        return [text for name in names for text in cell(name, row["what"])]

    return listed(one_each, header, lambda row: str(row["what"]), cells)


def conversions(found: list[Row]) -> str:
    """Our conversion on the card, and the conversion through the host and SciPy."""
    header = ["", "bsrgemm, ms", "copied to the host, SciPy, copied back, ms", "faster"]

    def cells(row: Row) -> list[str]:
        times = [number(row["seconds"] * 1e3, 2), number(row["through_host"] * 1e3)]
        return [*times, f"{row['through_host'] / row['seconds']:.0f} x"]

    return listed(found, header, lambda row: str(row["case"]), cells)


# ---------------------------------------------------------------------------------- sparse results
def sparse_products(found: list[Row]) -> str:
    """A @ A of random blocks: the whole call and its products alone, beside a dense product."""
    header = ["float16, density .22", "ms", "TFLOP/s", "at least", "reached", "dense cuBLAS, ms"]

    def name(row: Row) -> str:
        return f"n = {size(row['n'])}, {row['block'][0]} x {row['block'][1]}, {row['what']}"

    def cells(row: Row) -> list[str]:
        dense = row["peers"].get("cuBLAS")
        ours = [number(row["seconds"] * 1e3, 3), number(row["tflops"])]
        return [*ours, target(row["target"], 0), verdict(row["reached"]), number(dense and dense * 1e3, 2)]

    return listed(found, header, name, cells)


def mesh_products(found: list[Row]) -> str:
    """A @ A of a mesh beside its peers."""
    peers = peer_names(found)
    header = ["3 x 3 blocks, float64", "bsrgemm, ms", *(f"{name}, ms" for name in peers), "faster than all", "wanted"]

    def cells(row: Row) -> list[str]:
        taken = [row["peers"].get(name) for name in peers]
        wanted = f"{row['target']:.0f} x cupyx csr" if row["target"] else ""
        told = "-" if row["ratio"] is None else f"{row['ratio']:.1f} x"
        theirs = [number(x and x * 1e3, 2) for x in taken]
        return [number(row["seconds"] * 1e3, 2), *theirs, told, f"{wanted} {verdict(row['reached'])}"]

    return listed(found, header, lambda row: f"{row.get('cells')}^3 hexahedra, {row.get('n', 0):,} rows", cells)


def sampled(found: list[Row]) -> str:
    """Rates of sampled products beside the dense one."""
    header = ["density .22", "ms", "TFLOP/s", "of dense cuBLAS", "at least", "reached", "torch sampled_addmm, TFLOP/s"]

    def name(row: Row) -> str:
        return f"{row['dtype']}, {row['block'][0]} x {row['block'][1]}, Y {row['layout']}-major"

    def cells(row: Row) -> list[str]:
        ours = [number(row["seconds"] * 1e3, 3), number(row["tflops"], 1), number(row["ratio"], 2)]
        theirs = number(row["peers"].get("torch sampled_addmm"), 2)
        return [*ours, target(row["target"]), verdict(row["reached"]), theirs]

    return listed(found, header, name, cells)


# ----------------------------------------------------------------------------------------- solvers
def solver_name(row: Row) -> str:
    return f"{row['problem']}, {row['unknowns']:,} unknowns, {row['smoother']}"


def solvers(found: list[Row]) -> str:
    """Time to 1e-8, its share in products, and peers with the same smoother."""
    header = ["", "bsrgemm, ms", "iterations", "in products", "cupyx csr, ms", "pyamg on the CPU, ms"]

    def cells(row: Row) -> list[str]:
        if not row.get("good"):
            return ["**WRONG**", *[""] * (len(header) - 2)]
        peers = row["peers"]
        theirs = [
            number(peers[name]["seconds"] * 1e3, 1) + f" ({peers[name]['iterations']})" if name in peers else "-"
            for name in ("cupyx csr", "pyamg")
        ]
        inside = f"{row['products']['A, P, R'] / row['seconds']:.0%}"
        return [number(row["seconds"] * 1e3, 1), str(row["iterations"]), inside, *theirs]

    return listed(found, header, solver_name, cells)


def systems(found: list[Row]) -> str:
    """Set-up, new numbers and solution by `bsrgemm.linalg`, and by pyamg on the host."""
    header = ["", "set-up, ms", "refresh, ms", "solution, ms", "iterations"]

    def cells(row: Row) -> list[str]:
        if row.get("info"):
            return ["**WRONG**", *[""] * (len(header) - 2)]
        times = [row.get(step) for step in ("setup", "refresh", "solution")]
        return [*(number(seconds and seconds * 1e3, 1) for seconds in times), str(row["iterations"])]

    return listed(found, header, lambda row: f"{row['problem']}, {row['unknowns']:,} unknowns, {row['what']}", cells)


def whole_jobs(found: list[Row]) -> str:
    """From block-COO on the card to x at 1e-8."""
    header = ["", "seconds", "unknowns a second", "iterations"]

    def cells(row: Row) -> list[str]:
        if row["info"]:
            return ["**WRONG**", *[""] * (len(header) - 2)]
        return [number(row["seconds"], 3), f"{row['rate']:,.0f}", str(row["iterations"] or "-")]

    rows = [row for row in found if "rate" in row]
    return listed(rows, header, lambda row: f"{row['problem']}, {row['unknowns']:,} unknowns, {row['what']}", cells)


def decompositions(found: list[Row]) -> str:
    """What ``M @ r`` takes, beside one product with the matrix."""
    header = ["", "set-up, ms", "M @ r, ms", "over A @ x", "in a graph, ms", "over A @ x in a graph"]

    def cells(row: Row) -> list[str]:
        times = [number(row[name] * 1e3, digits) for name, digits in (("setup", 1), ("seconds", 2))]
        replayed = [number(row["replayed"] * 1e3, 2), number(row["multiple_replayed"], 1)] if "replayed" in row else []
        return [*times, number(row["multiple"], 1), *(replayed or ["-", "-"])]

    rows = [row for row in found if "multiple" in row]
    return listed(rows, header, lambda row: f"{row['problem']}, {row['unknowns']:,} unknowns, {row['what']}", cells)
