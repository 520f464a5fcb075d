"""``python -m bsrgemm info``: what this machine offers, as aligned text."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from .._environment import PRODUCTS, info


def lines(found: dict[str, Any]) -> Iterator[str]:
    """`info()` as aligned text."""
    for name, version in found["versions"].items():
        yield _pair(name, version or "-")
    device = found["device"]
    if device:
        capability, memory = device["compute_capability"], device["memory"] / 2**30
        yield _pair("device", f"{device['name']}, compute capability {capability}, {memory:.0f} GiB")
    else:
        yield _pair("device", "-")
    yield _pair("kernel target", found["target"] or "-")
    yield _pair("CUDA sources", found["sources"] or "-")
    cache = found["cache"]
    size = cache["bytes"] / 2**20
    yield _pair("kernel cache", f"{cache['folder']}: {cache['entries']} entries, {size:.1f} MiB")
    yield ""
    yield from _table(found["kernels"])
    for what in found["missing"]:
        yield ""
        yield f"missing: {what}"


def _pair(name: str, value: str) -> str:
    return f"{name:<14}{value}"


def _table(kernels: list[dict[str, Any]]) -> Iterator[str]:
    table = [["device", *PRODUCTS, "summed in", "dtypes"]]
    for row in kernels:
        names = [row["products"][product] for product in PRODUCTS]
        table.append([row["device"], *names, row["summed_in"], " ".join(row["dtypes"])])
    widths = [max(len(row[k]) for row in table) for k in range(len(table[0]))]
    for cells in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def add_command(commands: Any) -> None:
    """Add `info` to the command line."""
    parser = commands.add_parser("info", help="versions, device, kernel cache, which kernel serves which dtype")
    parser.set_defaults(command=_print)


def _print(args: argparse.Namespace) -> int:
    for line in lines(info()):
        print(line)
    return 0
