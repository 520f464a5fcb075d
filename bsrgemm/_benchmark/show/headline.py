"""The tables of the README: a few rows of each group, three digits, beside the best peer, no targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .attention_rows import attention_name, attention_peers, sustained_attention
from .markdown import Row, best, listed, number, peer_names, ratio, three
from .product_rows import product_name, small_block_name, solver_name, sustained_products

_SPARSE = {"cuSPARSE BSR": "cuSPARSE BSR", "cuSPARSE ELL": "cuSPARSE Blocked-ELL", "torch BSR": "torch (Triton)"}
#: Rows that the README shows of the first file of a group, and sides of small blocks, in float64
HEADLINE_ROWS = {"gemm": 4, "attention": 5, "solver": 4}
HEADLINE_SIDES = (2, 3, 4, 6)


def products(found: list[Row]) -> str:
    """Rates beside the best peer that takes the blocks, and beside dense cuBLAS."""
    header = ["n = 8192, 8192 columns", "bsrgemm", "best sparse peer", "times that", "dense cuBLAS", "share of dense"]

    def cells(row: Row) -> list[str]:
        rate, there = row["tflops"], {name: x for name, x in row["peers"].items() if x}
        peer = max(there, key=there.__getitem__, default=None)
        beside = ["-", "-"] if peer is None else [f"{three(there[peer])} by {_SPARSE[peer]}", three(rate / there[peer])]
        return [three(rate), *beside, three(row["dense_tflops"]), three(row["ratio"])]

    return listed(found, header, product_name, cells) + sustained_products(found)


def attention(found: list[Row]) -> str:
    """Rates beside every peer that has such a mask."""
    names = attention_peers(found)
    header = ["B, H, S, D, mask", "bsrgemm", *names, "over the best peer"]

    def cells(row: Row) -> list[str]:
        theirs = [three(row["peers"].get(name)) for name in names]
        return [three(row["tflops"]), *theirs, ratio(row["tflops"], best(row["peers"], ["cF"]))]

    return listed(found, header, attention_name, cells) + sustained_attention(found)


def vectors(found: list[Row]) -> str:
    """Shares of the bandwidth of a copy."""
    peers = peer_names(found)

    def cells(row: Row) -> list[str]:
        theirs = [three(row["peers"].get(name)) for name in peers]
        return [three(row["share"]), *theirs, ratio(row["share"], best(row["peers"])), three(row["seconds"] * 1e3)]

    return listed(found, ["", "bsrgemm", *peers, "over the best peer", "bsrgemm, ms"], small_block_name, cells)


def solvers(found: list[Row]) -> str:
    """Time to 1e-8 beside the same algorithm on cupyx's matrices, and pyamg on the CPU."""
    header = ["", "bsrgemm, ms", "cupyx csr, ms", "pyamg on the CPU, ms", "faster than cupyx", "iterations"]

    def cells(row: Row) -> list[str]:
        if not row.get("good"):
            return ["**WRONG**", *[""] * (len(header) - 2)]
        peers = row["peers"]
        theirs = [peers[name]["seconds"] * 1e3 if name in peers else None for name in ("cupyx csr", "pyamg")]
        ours = row["seconds"] * 1e3
        return [three(ours), *map(three, theirs), three(theirs[0] and theirs[0] / ours), number(row["iterations"])]

    return listed(found, header, solver_name, cells)


def _first(group: str) -> Callable[[list[Row]], list[Row]]:
    return lambda found: found[: HEADLINE_ROWS[group]]


def _products(found: list[Row]) -> list[Row]:
    """The first rows; in place of one that was measured with other code, the same product on another pattern."""

    def product(row: Row) -> list[Any]:
        return [*map(row.get, ("block", "dtype", "precision", "n", "columns", "kernel")), f"{row['density']:.2f}"]

    def current(row: Row) -> Row:
        others = (x for x in found if not x.get("stale") and "density" in x and product(x) == product(row))
        return next(others, row) if row.get("stale") else row

    return [current(row) for row in _first("gemm")(found)]


def _small_float64(found: list[Row]) -> list[Row]:
    return [row for row in found if row.get("dtype") == "float64" and row["block"][0] in HEADLINE_SIDES]


#: Group -> (which rows of its first file, how they are shown)
HEADLINES: dict[str, tuple[Callable[[list[Row]], list[Row]], Callable[[list[Row]], str]]] = {
    "gemm": (_products, products),
    "attention": (_first("attention"), attention),
    "vectors": (_small_float64, vectors),
    "solver": (_first("solver"), solvers),
}
