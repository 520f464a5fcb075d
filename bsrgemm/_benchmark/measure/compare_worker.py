"""One of the two processes of bench/run/compare.py: loads one tree of bsrgemm and times calls on request.

It is started as a script with the tree on PYTHONPATH, reads a line of JSON for each thing to do and answers with one.
It uses the public names of bsrgemm alone, so that older trees can be measured; clocks come from the file beside it.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

Call = Callable[[], Any]
#: Sizes on a GPU, and those on a CPU, which only show that it works
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"side": 8192, "length": 16384, "heads": 16, "rows": 300_000, "keys": 8192, "window": 2048, "blocks": 26,
             "copied": 1 << 27, "host": (200, 10)},
    "cpu": {"side": 512, "length": 256, "heads": 2, "rows": 500, "keys": 256, "window": 64, "blocks": 1,
            "copied": 1 << 18, "host": (3, 2)},
}  # fmt: skip
DENSITY, EACH, HEAD_DIM = 0.22, 27, 128
#: Iterations of the solver
ITERATIONS = 50


class Worker:
    """The cases of one tree: operands, our calls, the calls of a peer and of the host."""

    def __init__(self, device: str) -> None:
        import bsrgemm

        self.bg, self.device, self.size = bsrgemm, device, SIZES[device]
        if device == "cpu":
            self.xp: Any = np
        else:
            import cupy

            self.xp = cupy
        self.timing = _load_timing()
        self.clock = self.timing.Clock(device, quick=device == "cpu")
        self.calls: dict[str, Call] = {}

    # ------------------------------------------------------------------------------------ operands
    def normal(self, shape: tuple[int, ...], dtype: str = "float16", seed: int = 0) -> Any:
        return self.xp.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(dtype)

    def matrix(self, block: int, dtype: str = "float16") -> Any:
        """Random blocks, as many in every block row."""
        n = self.size["side"] // block
        order = np.random.default_rng(0).random((n, n)).argsort(axis=1)
        columns = np.sort(order[:, : max(1, round(DENSITY * n))], axis=1)
        return self._blocks(columns, block, dtype, n)

    def band(self, block: int, dtype: str) -> Any:
        """27 blocks of each block row, near the diagonal."""
        rows = self.size["rows"]
        first = np.clip(np.arange(rows) - EACH // 2, 0, rows - EACH)
        return self._blocks(first[:, None] + np.arange(EACH), block, dtype, rows)

    def _blocks(self, columns: np.ndarray[Any, Any], block: int, dtype: str, side: int) -> Any:
        rows, each = columns.shape
        lists = (columns.reshape(-1), np.arange(rows + 1) * each)
        indices, indptr = (self.xp.asarray(x.astype(np.int32)) for x in lists)
        data = self.normal((rows * each, block, block), dtype)
        return self.bg.bsr_array((data, indices, indptr), shape=(rows * block, side * block))

    def qkv(self) -> tuple[Any, Any, Any]:
        shape = (1, self.size["heads"], self.size["length"], HEAD_DIM)
        return self.normal(shape, seed=1), self.normal(shape, seed=2), self.normal(shape, seed=3)

    # --------------------------------------------------------------------------------------- cases
    def product(self, block: int) -> Call:
        n = self.size["side"]
        return partial(self.bg.matmul, self.matrix(block), self.normal((n, n)), out=self.xp.empty((n, n), np.float16))

    def vector(self, block: int, dtype: str) -> Call:
        A = self.band(block, dtype)
        return partial(self.bg.matmul, A, self.normal((A.shape[1],), dtype), out=self.xp.empty(A.shape[0], dtype))

    def square(self) -> Call:
        A = self.matrix(128)
        return lambda: (A @ A).data

    def sampled(self) -> Call:
        n, pattern = self.size["side"], self.matrix(128)
        X, Y = self.normal((n, n), seed=1), self.normal((n, n), seed=2)
        return lambda: self.bg.sddmm(X, Y, pattern).data

    def attend(self, mask: Any = None, **options: Any) -> Call:
        q, k, v = self.qkv()
        return partial(self.bg.attention, q, k, v, mask=mask, out=self.xp.empty_like(q), **options)

    def random_mask(self) -> Any:
        heads = (1, self.size["heads"])
        return self.bg.BlockMask.random(
            self.size["length"], per_row=self.size["blocks"], heads=heads, block=128, device=self.device
        )

    def decode(self, batch: int) -> Call:
        shape = (batch, 8, self.size["keys"], HEAD_DIM)
        store = self.bg.KVCache(*shape, dtype=np.float16, device=self.device)
        store.append(self.normal(shape, seed=1), self.normal(shape, seed=2))
        q = self.normal((batch, 32, 1, HEAD_DIM), seed=3)
        return partial(self.bg.attention_decode, q, store, out=self.xp.empty_like(q))

    def solve(self) -> Call:
        """Conjugate gradients without a preconditioner, a fixed number of iterations."""
        A = self.band(3, "float64")
        x, r = self.xp.zeros(A.shape[0]), self.normal((A.shape[0],), "float64")
        q = self.xp.empty_like(r)

        def run() -> Any:
            x.fill(0)
            p, residual = r.copy(), r.copy()
            old = residual.dot(residual)
            for _ in range(ITERATIONS):
                self.bg.matmul(A, p, out=q)
                step = old / p.dot(q)
                x[...] += step * p
                residual[...] -= step * q
                new = residual.dot(residual)
                p[...] = residual + new / old * p
                old = new
            return x

        return run

    def cases(self) -> dict[str, Callable[[], Call]]:
        """Name -> what makes the call."""
        window = {"causal": True, "window": (self.size["window"] - 1, 0)}
        return {
            **{f"A @ B, blocks of {b}": partial(self.product, b) for b in (128, 64, 32, 16)},
            "attention, full": self.attend,
            "attention, causal": partial(self.attend, causal=True),
            "attention, window": lambda: self.attend(**window),
            "attention, random blocks": lambda: self.attend(self.random_mask()),
            "A @ x, 3 x 3 float64": partial(self.vector, 3, "float64"),
            "A @ x, 6 x 6 float32": partial(self.vector, 6, "float32"),
            "A @ A, blocks of 128": self.square,
            "sddmm, blocks of 128": self.sampled,
            "decode, 1 sequence": partial(self.decode, 1),
            "decode, 32 sequences": partial(self.decode, 32),
            "solver": self.solve,
        }

    # --------------------------------------------------------------------------------------- peers
    def peer(self, name: str) -> tuple[str, Call]:
        """The peer that stands for the speed of the card beside a case, kept for all cases of its kind."""
        kind = "attention" if name.startswith("attention") else "copy" if name[:5] in _BY_BYTES else "dense"
        if kind == "attention":
            try:
                return "cuDNN", self._kept("cuDNN", self._cudnn)
            except (ImportError, RuntimeError):
                kind = "dense"
        make = {"dense": self._dense, "copy": self._copy}[kind]
        return {"dense": "cuBLAS", "copy": "copy"}[kind], self._kept(kind, make)

    def _kept(self, name: str, make: Callable[[], Call]) -> Call:
        key = f"peer {name}"
        if key not in self.calls:
            self.calls[key] = make()
        return self.calls[key]

    def _dense(self) -> Call:
        n = self.size["side"]
        kind = "float32" if self.device == "cpu" else "float16"
        A, B = self.normal((n, n), kind, 1), self.normal((n, n), kind, 2)
        return partial(self.xp.matmul, A, B, out=self.xp.empty_like(A))

    def _copy(self) -> Call:
        source = self.xp.ones(self.size["copied"], np.float64)
        return partial(self.xp.copyto, self.xp.empty_like(source), source)

    def _cudnn(self) -> Call:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if self.device == "cpu":
            raise ImportError("cuDNN is for GPUs")
        operands = [torch.from_dlpack(x) for x in self.qkv()]

        def call() -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(*operands)

        call()
        return call

    # ---------------------------------------------------------------------------------- host times
    def host_calls(self) -> dict[str, Call]:
        """Calls so small that only the time of the host matters."""
        bg, xp = self.bg, self.xp

        def product(block: int, N: int, dtype: str) -> Call:
            A = bg.bsr_array(np.ones((2 * block, 2 * block), dtype), blocksize=(block, block), device=self.device)
            return partial(
                bg.matmul, A, xp.ones((2 * block, N), dtype), out=xp.empty((2 * block, N), dtype)
            )  # fmt: skip

        q, k, v = (self.normal((1, 2, 256, HEAD_DIM), seed=seed) for seed in (1, 2, 3))
        out, mask = xp.empty_like(q), bg.BlockMask.random(256, per_row=1, device=self.device)
        store = bg.KVCache(1, 2, 256, HEAD_DIM, dtype=np.float16, device=self.device)
        store.append(k, v)
        token = xp.ascontiguousarray(q[:, :, :1])
        return {
            "host: matmul, 64 x 64 float16": product(64, 64, "float16"),
            "host: matmul, 3 x 3 float32": product(3, 1, "float32"),
            "host: attention, causal": partial(bg.attention, q, k, v, causal=True, out=out),
            "host: attention, mask": partial(bg.attention, q, k, v, mask=mask, out=out),
            "host: attention_decode": partial(bg.attention_decode, token, store, out=xp.empty_like(token)),
        }

    def host_times(self) -> dict[str, float]:
        """Host seconds of each small call as multiples of an addition of two small arrays."""
        a, b, out = (self.xp.zeros(16, np.float32) for _ in range(3))
        synchronize = (lambda: None) if self.device == "cpu" else self.xp.cuda.Device().synchronize
        count, rounds = self.size["host"]

        def seconds(call: Call) -> float:
            return float(self.timing.host_seconds(call, synchronize, count, rounds))

        if "host" not in self.calls:
            self.kept_host = self.host_calls()
            self.calls["host"] = lambda: None
        unit = seconds(lambda: self.xp.add(a, b, out))
        return {name: seconds(call) / unit for name, call in self.kept_host.items()}

    # ------------------------------------------------------------------------------------ commands
    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What a command gives."""
        what, name = asked["do"], asked.get("case", "")
        if what == "hello":
            return {"file": str(self.bg.__file__), "cases": list(self.cases())}
        if what == "prepare":
            self.calls[name] = self.cases()[name]()
            result = self.calls[name]()
            peer, beside = self.peer(name)
            beside()
            return {"checksum": float(self.xp.abs(result.astype(np.float32)).mean()), "peer": peer}
        if what == "time":
            _, beside = self.peer(name)
            return {"ours": self.clock.seconds(self.calls[name]), "peer": self.clock.seconds(beside)}
        if what == "drop":
            self.calls.pop(name, None)
            if self.device == "cuda":
                self.xp.get_default_memory_pool().free_all_blocks()
            return {}
        if what == "host":
            return {"adds": self.host_times()}
        raise ValueError(f"do: expected hello, prepare, time, drop or host, got {what!r}")


_BY_BYTES = ("A @ x", "decod", "solve")


def _load_timing() -> Any:
    """The clocks from the file beside this one, without importing the bsrgemm that they belong to."""
    package = types.ModuleType("compare_clocks")
    package.__path__ = [str(Path(__file__).resolve().parents[2])]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}._benchmark.timing")


def serve(device: str) -> None:
    """Answer line by line; a failure is reported in one line, and the traceback goes to standard error."""
    answers, sys.stdout = sys.stdout, sys.stderr  # so that nothing else writes between the answers
    worker: Worker | None = None
    for line in sys.stdin:
        try:
            worker = worker or Worker(device)
            found = worker.answer(json.loads(line))
        except Exception as error:
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
