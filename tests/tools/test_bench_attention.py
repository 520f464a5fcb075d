"""The parts of bench/run/attention.py and llama.py that need no GPU: what is counted, checked and compared."""

from __future__ import annotations

import contextlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._benchmark import machine, runner, timing
from bsrgemm._benchmark.cases import llama as model
from bsrgemm._benchmark.cases import llama_graph
from bsrgemm._benchmark.checks.attention import TOLERANCE, Reference
from bsrgemm._benchmark.measure import attention as script
from bsrgemm._benchmark.measure import attention_backward_accuracy as gradient_accuracy
from bsrgemm._benchmark.measure import attention_run, llama
from bsrgemm._benchmark.measure import attention_studies as studies
from bsrgemm._benchmark.measure.attention_cases import Target, attention, operands_of
from bsrgemm._benchmark.peers import attention as attention_peers
from bsrgemm._benchmark.show import attention_rows as table_rows

ON_CPU = runner.Bench(device="cpu")


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_gpu", lambda: False)


CASES = [{}, {"causal": True}, {"window": 20}, {"blocks": (16, 2), "per_head": True}, {"blocks": (32, 1)}]


@pytest.mark.parametrize("options", CASES)
def test_pairs_and_sampled_rows_are_those_of_the_dense_mask(options: dict[str, Any]) -> None:
    problem = attention((2, 4, 96, 64), **options)
    mask = problem.mask("cpu")
    place = np.arange(96)
    dense = np.ones((96, 96), bool)
    if problem.causal or problem.window:
        dense &= place <= place[:, None]
    if problem.window:
        dense &= place[:, None] - place < problem.window
    every = np.broadcast_to(dense if mask is None else mask.to_dense(), (2, 4, 96, 96))
    assert problem.pairs * 2 * 4 == every.sum() and problem.flops == 4 * 64 * every.sum()
    np.testing.assert_array_equal(problem.seen(mask).rows(96, 1, 2, place), every[1, 2])


@pytest.mark.parametrize("options", CASES)
def test_a_wrong_result_is_seen_in_any_of_the_checked_tiles(options: dict[str, Any]) -> None:
    problem = attention((2, 4, 256, 64), **options)
    q, k, v = operands_of(ON_CPU, problem)
    mask = problem.mask("cpu")
    reference = Reference.of(problem.seen(mask), q, k, v)
    out = bg.attention(q, k, v, mask=mask, **problem.options)
    assert reference.error(out) <= TOLERANCE["float16"]
    for place in (0, 128, 255):
        wrong = out.copy()
        wrong[1, 3, place, 5] += 0.1
        assert not reference.error(wrong) <= TOLERANCE["float16"]
    out[0, 0, 0, 0] = np.nan
    assert not reference.error(out) <= TOLERANCE["float16"]


@pytest.mark.parametrize("options", CASES)
def test_peers_in_numpy_agree(options: dict[str, Any]) -> None:
    problem = attention((1, 4, 128, 64), **options)
    q, k, v = operands_of(ON_CPU, problem)
    mask = problem.mask("cpu")
    got = attention_peers.plain(q, k, v, mask=mask, **problem.options)()
    assert Reference.of(problem.seen(mask), q, k, v).error(got) <= TOLERANCE["float16"]


def test_targets_are_judged_against_what_was_measured() -> None:
    others = {"cuDNN": 600.0, "FA4": None, "cF": 900.0}
    assert Target(1.1, "cuDNN").reached(700, others)
    assert Target(1.1, "best").reached(700, others)
    assert not Target(1.0, "cF").reached(700, others)
    assert Target(1.0, "FA4").reached(700, others) is None
    assert Target(560, "TFLOP/s").reached(561, {})


def test_a_fit_finds_its_line() -> None:
    assert np.allclose(studies.line_fit([0.0, 1.0, 2.0], [1.0, 3.0, 5.0]), (2, 1))


@pytest.mark.parametrize("section", script.SECTIONS)
def test_every_section_runs_and_has_a_table(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def samples(clock: timing.Clock, call: timing.Call) -> list[float]:
        assert call() is not None
        return [1e-3]

    monkeypatch.setattr(timing.Clock, "samples", samples)
    monkeypatch.setattr(timing, "ROUNDS", {"cpu": (1, 1)})
    script.main([section, "--quick", "--json", str(tmp_path / "measured.json")])
    assert "WRONG" not in capsys.readouterr().out
    found = json.loads((tmp_path / "measured.json").read_text())[section]
    assert found and not [row for row in found if row.get("failed") or row.get("wrong")]
    render = {"table": table_rows.attention}.get(section) or getattr(table_rows, section)
    assert render(found).count("\n") > len(found) / 2


def test_what_is_not_installed_is_said_once() -> None:
    run, said = runner.Bench(), []

    class Lines:
        note = said.append

    def absent() -> None:
        raise ModuleNotFoundError("No module named 'x'")

    for _ in range(2):
        assert run.attempt("X", "here", absent) is None
        assert run.attempt("Y", "there", lambda: 1 / 0) is None
        run.explain(Lines)
    assert [line.split(":")[0].strip(" -") for line in said] == ["X", "Y", "Y"]


def test_the_tiny_llama_has_the_logits_of_plain_attention() -> None:
    worst, mean, same = llama.compared(model.Model(model.TINY, np))
    assert worst <= model.TOLERANCE["float32"] and mean <= worst and same


def test_a_layer_and_its_blocks_share_their_memory() -> None:
    rng = np.random.default_rng(3)
    for outputs, rows in ((256, 128), (1000, 8)):
        weight = model.Weight.of(rng.standard_normal((outputs, 48)).astype(np.float32))
        assert np.shares_memory(weight.blocks.data, weight.dense) and weight.blocks.blocksize == (rows, 48)
        x = rng.standard_normal((5, 48)).astype(np.float32)
        np.testing.assert_allclose(weight.product(x), weight.dense_product(x), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(weight.dense_product(x), x @ weight.dense.T)


class SmallKernels:
    """What the kernels of the graph compute, on NumPy."""

    @staticmethod
    def llama_embed(embedding: Any, tokens: Any, place: Any, x: Any, width: Any) -> None:
        assert width == x.shape[1]
        x[0] = embedding[tokens[place[0]]]

    @staticmethod
    def llama_norm_row(x: Any, weight: Any, y: Any, width: Any) -> None:
        assert width == x.shape[1]
        y[...] = model.rms_norm(x, weight)

    @staticmethod
    def llama_rotate_at(x: Any, cos: Any, sin: Any, place: Any, heads: Any, half: Any) -> None:
        assert half == x.shape[2] // 2
        model.rotate(x[:, :heads], cos[place], sin[place])

    @staticmethod
    def llama_swiglu_row(both: Any, y: Any, inner: Any) -> None:
        assert inner == y.shape[1]
        y[...] = model.swiglu(both)

    @staticmethod
    def llama_largest(logits: Any, best: Any, count: Any) -> None:
        best[...] = logits[0, :count].argmax()

    @staticmethod
    def llama_advance(best: Any, tokens: Any, place: Any, room: Any) -> None:
        assert room == len(tokens)
        place += 1
        tokens[place] = best


def test_a_step_of_the_graph_makes_the_tokens_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = types.SimpleNamespace(synchronize=lambda: None)
    cuda = types.SimpleNamespace(Stream=lambda non_blocking: stream, get_current_stream=lambda: stream)
    arrays = {name: getattr(np, name) for name in ("empty", "zeros", "full")}
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda, **arrays))  # type: ignore[arg-type]
    sizes = {"llama_embed": model.TINY.hidden, "llama_swiglu_row": model.TINY.inner, "llama_rotate_at": 6 * 32}

    def run(name: str, ctas: int, threads: int, *arguments: Any) -> None:
        assert ctas * threads >= sizes.get(name, 1)
        getattr(SmallKernels, name)(*arguments)

    monkeypatch.setattr(llama_graph, "_run", run)
    tiny = model.Model(model.TINY, np)
    prompt, count = np.arange(7), 5
    want, ours = (tiny.caches(32) for _ in range(2))
    logits = tiny.forward(prompt, 0, model.prefilling(want))
    tiny.forward(prompt, 0, model.prefilling(ours))
    decoder = llama_graph.GraphDecoder(tiny, ours, int(logits.argmax()), 7)
    for token, after in llama.generate(tiny, want, logits, count):
        assert decoder.made()[-1] == token[0]
        decoder.step()
        np.testing.assert_allclose(decoder.logits, after, rtol=1e-3, atol=1e-4)
    assert len(decoder.made()) == count + 1 and ours[0].lengths.tolist() == [12]


def test_the_small_kernels_of_the_graph_compile() -> None:
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    program = nvrtc.createProgram(llama_graph.SOURCE, "llama.cu", [], [])
    try:
        nvrtc.compileProgram(program, ["--gpu-architecture=sm_90", "-std=c++17"])
        assert not nvrtc.getProgramLog(program).strip("\0\n ")
    finally:
        nvrtc.destroyProgram(program)


# ------------------------------------------------------------- peers that are not installed here
class Tensor(np.ndarray):
    """As much of a tensor of torch as the adapters use, on NumPy."""

    def transpose(self, *axes: int) -> Any:
        return self.swapaxes(*axes)

    def contiguous(self) -> Any:
        return np.ascontiguousarray(self).view(Tensor)

    def cuda(self) -> Any:
        return self


def _attend_lists(q: Any, k: Any, v: Any, counts: Any, listed: Any, block: int) -> Any:
    """Attention on lists of blocks, (batch, heads, length, head dim), as the documentation of the peers has it."""
    (B, H, S, D), out = q.shape, np.zeros(q.shape, np.float64)
    assert counts.shape[2] * block == S and counts.dtype == listed.dtype == np.int32
    for b, h, i in np.ndindex(B, H, S // block):
        lists = (min(b, len(counts) - 1), min(h, counts.shape[1] - 1), i)
        keys = (listed[lists][: counts[lists]][:, None] * block + np.arange(block)).reshape(-1)
        rows = slice(i * block, (i + 1) * block)
        scores = np.asarray(q[b, h, rows], np.float64) @ np.asarray(k[b, h, keys], np.float64).T / D**0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[b, h, rows] = weights / weights.sum(axis=1, keepdims=True) @ np.asarray(v[b, h, keys], np.float64)
    return out.astype(q.dtype).view(Tensor)


@pytest.fixture
def fake_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch, FlashAttention-4 and cuDNN's frontend, each on NumPy."""

    def cudnn(
        q: Any, k: Any, v: Any, index: Any, *, block_sparse_num: int, q2k_block_nums: Any, sparse_block_size: int
    ) -> Any:
        assert index.shape == (*q.shape[:2], q.shape[2] // sparse_block_size, block_sparse_num)
        out = _attend_lists(q, k, v, q2k_block_nums, index, sparse_block_size)
        return {"lse": np.zeros(q.shape[:3], np.float32), "o": out}

    def flash(q: Any, k: Any, v: Any, *, causal: bool = False, block_sparse_tensors: Any = None, **window: Any) -> Any:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        if block_sparse_tensors is not None:
            blocks = block_sparse_tensors
            assert not blocks.mask_block_cnt.any() and blocks.block_size == (128, 128)
            out = _attend_lists(q, k, v, blocks.full_block_cnt, blocks.full_block_idx, 128)
        else:
            left, right = (window.get(f"window_size_{side}") for side in ("left", "right"))
            limits = (-1 if left is None else left, -1 if right is None else right)
            out = attention_peers.plain(q, k, v, causal=causal, window=limits)().view(Tensor)
        return out.swapaxes(1, 2), None

    torch: Any = types.ModuleType("torch")
    torch.from_numpy = torch.from_dlpack = lambda x: x.view(Tensor)
    torch.no_grad = contextlib.nullcontext
    modules: dict[str, Any] = {"torch": torch}
    for name in ("cudnn", "cudnn.block_sparse_attention", "flash_attn", "flash_attn.cute", "flash_attn.cute.interface",
                 "flash_attn.cute.block_sparsity"):  # fmt: skip
        modules[name] = types.ModuleType(name)
    modules["cudnn.block_sparse_attention"].BSA = types.SimpleNamespace(block_sparse_attention_forward=cudnn)
    modules["flash_attn.cute.interface"]._flash_attn_fwd = flash
    modules["flash_attn.cute.block_sparsity"].BlockSparseTensorsTorch = types.SimpleNamespace
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 100}, {"blocks": (128, 1), "per_head": True}])
def test_flash_attention_4_is_called_as_its_documentation_says(fake_peers: None, options: dict[str, Any]) -> None:
    problem = attention((2, 4, 256, 64), **options)
    q, k, v = operands_of(ON_CPU, problem)
    mask = problem.mask("cpu")
    got = attention_peers.fa4(q, k, v, mask=mask, **problem.options)()
    assert Reference.of(problem.seen(mask), q, k, v).error(np.asarray(got)) <= TOLERANCE["float16"]


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("per_head", [False, True])
def test_the_frontend_of_cudnn_is_called_as_its_documentation_says(
    fake_peers: None, block: int, per_head: bool
) -> None:
    problem = attention((2, 4, 512, 64), blocks=(block, 3), per_head=per_head)
    q, k, v = operands_of(ON_CPU, problem)
    mask = problem.mask("cpu")
    got = attention_peers.block_sparse_cudnn(q, k, v, mask=mask)()
    assert Reference.of(problem.seen(mask), q, k, v).error(np.asarray(got)) <= TOLERANCE["float16"]


def test_masks_that_a_peer_does_not_have_are_refused(fake_peers: None) -> None:
    q, k, v = operands_of(ON_CPU, attention((1, 2, 256, 64)))
    for options in ({}, {"causal": True, "mask": bg.BlockMask.random(256, per_row=1)}):
        with pytest.raises(NotImplementedError, match="block masks only"):
            attention_peers.block_sparse_cudnn(q, k, v, **options)
    with pytest.raises(NotImplementedError, match="square blocks of"):
        attention_peers.block_sparse_cudnn(q, k, v, mask=bg.BlockMask.random(256, per_row=1, block=32))
    with pytest.raises(NotImplementedError, match="blocks of 128 x 128 only"):
        attention_peers.fa4(q, k, v, mask=bg.BlockMask.random(256, per_row=1, block=64))
    with pytest.raises(NotImplementedError, match="whole blocks only"):
        attention_peers.block_sparse_cudnn(q, k, v, mask=bg.BlockMask.causal(256))


def test_blocks_are_listed_row_by_row() -> None:
    mask = bg.BlockMask.from_dense(
        np.kron(np.array([[1, 0, 1], [0, 1, 0], [0, 0, 0]]), np.ones((64, 64))) > 0, block=64
    )
    counts, listed = attention_peers.block_lists(mask)
    assert counts.tolist() == [[[2, 1, 0]]] and listed.tolist() == [[[[0, 2, 0], [1, 0, 0], [0, 0, 0]]]]


def test_peers_without_their_wheels_are_left_out_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("torch", "flash_attn", "flash_attn_interface", "cudnn"):
        monkeypatch.setitem(sys.modules, name, None)
    bench = attention_run.Bench(device="cuda")
    monkeypatch.setattr(runner.Bench, "xp", np)
    problem = attention((1, 2, 256, 64), blocks=(128, 1))
    operands, mask = operands_of(bench, problem), problem.mask("cpu")
    reference = Reference.of(problem.seen(mask), *operands)
    said: list[str] = []
    shown = types.SimpleNamespace(note=said.append)
    for _ in range(2):
        assert bench.peer_calls(("FA4", "cuDNN BSA"), "here", operands, reference, mask=mask) == {}
        bench.explain(shown)  # type: ignore[arg-type]
    assert [line.split(":")[0].strip(" -") for line in said] == ["FA4", "cuDNN BSA"]


# ------------------------------------------------------------------------------ errors of gradients
@pytest.mark.parametrize("kind", studies.HARD)
@pytest.mark.parametrize("causal", [False, True])
def test_errors_of_gradients_are_those_of_rounding(kind: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our gradients on the CPU are close to the reference; a gradient that is wrong by 1 % is not."""
    monkeypatch.setattr(gradient_accuracy, "_SHAPE", (2, 96, 32))
    x = gradient_accuracy.hard_operands(gradient_accuracy.case_of("float16", causal), kind, np)
    want = gradient_accuracy.exact(x)
    got = bg.attention_backward(x.dout, x.q, x.k, x.v, x.out, x.lse, **x.options)
    found = gradient_accuracy.errors(got, want)
    assert {"dv"} <= set(found) and all(error < 2e-2 for error in found.values())
    assert gradient_accuracy.errors([1.01 * y for y in want], want)["dv"] == pytest.approx(0.01, rel=1e-4)
