"""``python -m bsrgemm``: what it says, and that it can say no."""

from __future__ import annotations

import builtins
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bsrgemm import _environment, _kernel_index
from bsrgemm.__main__ import main
from bsrgemm._backend import array_kernels
from bsrgemm._backend.numpy_backend import HOST
from bsrgemm._backend.registry import Backend
from bsrgemm._cli import checks
from bsrgemm._cli import compile as compile_command
from bsrgemm._cli import verify as verify_command
from bsrgemm._kernels import element_types, jit
from bsrgemm._kernels.kernel import Kernel
from bsrgemm._products.block_products import SpgemmSimt
from bsrgemm._products.call import Problem, ProductCall
from bsrgemm._products.engine import ProductEngine
from bsrgemm._products.gemm_simt import GemmSimt, Spmv
from bsrgemm._products.host import ENGINE
from bsrgemm._products.spmv_small import SpmvSmall
from bsrgemm.dtypes import DEVICE_DTYPES

from ..conftest import BACKENDS, LONG

ROOT = Path(__file__).resolve().parents[2]
FLOAT32, INT64 = np.dtype(np.float32), np.dtype(np.int64)


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bsrgemm"


def _without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make every import of `package` fail as if it were not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)


# ---------------------------------------------------------------------------------------- info
def test_info_knows_versions_folders_and_kernels(cache_dir: Path) -> None:
    found = _environment.info()
    assert found["versions"]["numpy"] == np.__version__
    assert Path(found["sources"]) == ROOT / "cuda"
    assert found["cache"] == {"folder": str(cache_dir), "entries": 0, "bytes": 0}
    host = [dtype for row in found["kernels"] if row["device"] == "cpu" for dtype in row["dtypes"]]
    assert sorted(host) == sorted(map(str, HOST.dtypes))


def test_info_counts_the_cache(cache_dir: Path) -> None:
    cache_dir.mkdir(parents=True)
    (cache_dir / "a.cubin").write_bytes(b"12345")
    (cache_dir / ".other.tmp").write_bytes(b"1")
    cache = _environment.info()["cache"]
    assert (cache["entries"], cache["bytes"]) == (1, 5)


def test_info_without_cupy_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _without(monkeypatch, "cupy")
    assert main(["info"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("missing")]
    assert "CuPy" in line and "bsrgemm[cuda12]" in line


def test_info_without_a_device_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cupy")

    def no_device(cupy: Any) -> None:
        raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")

    monkeypatch.setattr(_environment, "_device", no_device)
    assert main(["info"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("missing")]
    assert "device" in line and "cudaErrorNoDevice" in line


def test_info_with_a_device_shows_it_and_its_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cupy")
    card = {"name": "Some Card", "compute_capability": "9.0", "memory": 80 << 30}
    monkeypatch.setattr(_environment, "_device", lambda cupy: card)
    monkeypatch.setattr(jit, "device_target", lambda: "sm_90a")
    found = _environment.info()
    assert found["device"] == card and found["target"] == "sm_90a" and found["missing"] == []
    device = [dtype for row in found["kernels"] if row["device"] == "cuda" for dtype in row["dtypes"]]
    assert sorted(device) == sorted(map(str, DEVICE_DTYPES))
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "Some Card, compute capability 9.0, 80 GiB" in text
    half = next(row["products"] for row in found["kernels"] if row["device"] == "cuda" and "float16" in row["dtypes"])
    wanted = ["spmv_small or gemm_few", "spmm or gemm_sm90", "spgemm_simt or block_products_sm90", "attention_sm90"]
    assert list(half.values()) == wanted and all(names in text for names in wanted)


def test_info_survives_a_broken_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy")

    def broken(*args: Any) -> Any:
        raise OSError("libcuda.so.1: not\nthere")

    for name in ("getDevice", "runtimeGetVersion", "driverGetVersion"):
        monkeypatch.setattr(cupy.cuda.runtime, name, broken)
    monkeypatch.setattr(jit, "nvrtc_version", broken)
    found = _environment.info()
    assert found["versions"]["nvrtc"] is None and found["target"] is None
    assert all("\n" not in line for line in found["missing"])


@pytest.mark.gpu
def test_info_on_a_gpu_misses_nothing() -> None:
    found = _environment.info()
    assert found["missing"] == [] and found["device"] and found["target"]


# -------------------------------------------------------------------------------------- verify
@pytest.mark.parametrize("backend", [BACKENDS[0], BACKENDS[2]], indirect=True)  # a fake card would take minutes
def test_every_check_of_verify_passes(backend: Backend) -> None:
    # Without a card, one dtype of each kind is enough by default.
    few = ("bool", "uint8", "int64", "bfloat16", "float32", "float64", "complex64")
    dtypes = [d for d in backend.dtypes if backend.name == "cuda" or LONG or str(d) in few]
    outcomes = list(verify_command.run(backend=backend, dtypes=dtypes, seed=5))
    assert [str(outcome) for outcome in outcomes if not outcome.ok] == []
    assert {outcome.dtype for outcome in outcomes} == {str(dtype) for dtype in dtypes}
    assert {outcome.name for outcome in outcomes} == {check.name for check in verify_command.CHECKS}


def test_verify_prints_a_line_for_each_check_and_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_command, "CHECKS", verify_command.CHECKS[:4])
    assert main(["verify", "--device", "cpu", "--seed", "11"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "seed 11" in lines[0]
    checks = lines[2:-1]
    assert len(checks) == sum(c.applies(HOST, dtype) for c in verify_command.CHECKS for dtype in HOST.dtypes)
    assert all(line.startswith("ok  ") for line in checks)
    assert lines[-1].startswith(f"{len(checks)} checks on cpu: {len(checks)} ok, 0 failed (seed 11,")


def test_verify_looks_the_same_without_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_command, "CHECKS", verify_command.CHECKS[:2])

    def lines() -> list[str]:
        assert main(["verify", "--device", "cpu", "--seed", "1"]) == 0
        return capsys.readouterr().out.splitlines()[:-1]  # the last line holds the time

    with_rich = lines()
    _without(monkeypatch, "rich")
    assert lines() == with_rich


def _almost(real: Callable[[ProductCall], None]) -> Callable[[ProductCall], None]:
    """A product that is right to 12 bits in its last row, as one in tf32 would be."""

    def multiply_dense(call: ProductCall) -> None:
        real(call)
        if call.out.dtype == np.float32:
            call.out[-1] *= np.float32(1 + 2.0**-12)

    return multiply_dense


def test_a_product_that_is_off_by_the_precision_of_tf32_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINE, "multiply_dense", _almost(ENGINE.multiply_dense))
    monkeypatch.setattr(ENGINE, "quick", lambda *args: None)
    failed = {outcome.name for outcome in verify_command.run(dtypes=[FLOAT32]) if not outcome.ok}
    assert failed >= {
        "A @ x, small blocks",
        "A @ x, large blocks",
        *(f"A @ B, N = {n}" for n in (2, 3, 7, 13, 32, 40, 300)),
        "A @ B, strided",
        "A @ B, column-major",
        "A @ B, int64 indices",
        "A @ B, duplicate blocks",
        "B @ A",
        "A.T @ B",
        "alpha, beta, out",
    }


def test_verify_ends_with_status_1_when_a_check_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ENGINE, "multiply_dense", _almost(ENGINE.multiply_dense))
    monkeypatch.setattr(verify_command, "CHECKS", verify_command.CHECKS[:2])
    assert main(["verify", "--device", "cpu"]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.startswith("FAIL")]
    assert len(failed) == 2 and all("float32" in line for line in failed)
    assert "2 failed" in last


#: A method of the engine or of the backend done wrong, and the check that must notice.
WRONG = {
    "multiply_dense": (lambda call: None, "A @ B, N = 7"),
    "segment_reduce": (lambda op, values, order, starts: values[: len(starts)], "segment add"),
    "transpose": (lambda blocks, block_cols: blocks, "A.T"),
}


@pytest.mark.parametrize("method", WRONG)
def test_a_wrong_method_fails_for_every_dtype(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, name = WRONG[method]
    monkeypatch.setattr(HOST if hasattr(HOST, method) else ENGINE, method, wrong)
    outcomes = list(verify_command.run([check for check in verify_command.CHECKS if check.name == name], HOST))
    assert [outcome.dtype for outcome in outcomes] == [str(dtype) for dtype in HOST.dtypes]
    assert not any(outcome.ok for outcome in outcomes)


@pytest.mark.parametrize(
    ("name", "check"),
    [("sddmm", "sddmm"), ("attention_backward", "gradients of attention"), ("attention", "attention")],
)
def test_a_function_that_is_a_percent_off_fails(name: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(checks, name)

    def off(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        first, rest = (found[0], found[1:]) if isinstance(found, tuple) else (found, None)
        first = (first * 1.01).astype(first.dtype)
        return first if rest is None else (first, *rest)

    monkeypatch.setattr(checks, name, off)
    wanted = [one for one in verify_command.CHECKS if one.name == check]
    assert not any(outcome.ok for outcome in verify_command.run(wanted, dtypes=[FLOAT32, np.dtype(np.float64)]))


def test_a_check_that_raises_fails_with_the_reason() -> None:
    def broken(trial: object) -> list[verify_command.Case]:
        raise OSError("no\nkernel")

    outcome, *_ = verify_command.run([verify_command.Check("broken", broken)])
    assert not outcome.ok
    assert "OSError: no kernel" in str(outcome)


@pytest.mark.parametrize(
    "case",
    [
        verify_command.Case("NaN", np.full(2, np.nan, np.float32), np.zeros(2), np.ones(2)),
        verify_command.Case("beside an empty sum", np.ones(2, np.float32), np.zeros(2), np.zeros(2)),
        verify_command.Case("wrong shape", np.zeros(2, np.float32), np.zeros(3), np.ones(3)),
        verify_command.Case("wrong dtype", np.zeros(2, np.float16), np.zeros(2), np.ones(2)),
        verify_command.Case("not equal", np.zeros(2, np.float32), np.ones(2)),
    ],
    ids=lambda case: case.label,
)
def test_a_wrong_case_fails(case: verify_command.Case) -> None:
    outcomes = {o.dtype: o for o in verify_command.run([verify_command.Check("case", lambda trial: [case])])}
    assert not outcomes["float32"].ok


def test_verify_reaches_every_shape_of_the_product_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the configs that tuning lists for float32: every value of every constant of each kernel."""
    met: set[Kernel] = set()
    multiply_dense, reduce_segments = ENGINE.multiply_dense, HOST.segment_reduce

    def multiply(call: ProductCall) -> None:
        A, B, out = call.matrix, call.B, call.out
        if {A.dtype, B.dtype, out.dtype} == {FLOAT32}:
            names = element_types.types(A.dtype, B.dtype, out.dtype, call.acc, A.indices.dtype)
            sides = A.blocksize[::-1] if call.transposed else A.blocksize
            problem = Problem("sm_75", names, *sides, B.shape[-1], 1, 1, 1, 1, False, "", "", True, False)
            met.add((GemmSimt if B.shape[-1] > 1 else Spmv).best(problem))
        multiply_dense(call)

    def segment_reduce(op: str, values: Any, order: Any, starts: Any) -> Any:
        entries = len(values) if order is None else len(order)
        if values.dtype == FLOAT32 and len(starts):
            met.add(array_kernels.segment(FLOAT32, op, entries // len(starts), int(np.prod(values.shape[1:]))))
        return reduce_segments(op, values, order, starts)

    def multiply_sparse(a: Any, b: Any, block_cols: int, dtype: Any, matrices: Any = None) -> Any:
        if dtype == FLOAT32:
            names = element_types.types(*[FLOAT32] * 4, INT64)
            met.add(SpgemmSimt.of(names, *a.data.shape[1:], b.data.shape[2]))
        return ProductEngine.multiply_sparse(ENGINE, a, b, block_cols, dtype)

    monkeypatch.setattr(HOST, "segment_reduce", segment_reduce)
    monkeypatch.setattr(ENGINE, "multiply_dense", multiply)
    monkeypatch.setattr(ENGINE, "quick", lambda *args: None)
    monkeypatch.setattr(ENGINE, "multiply_sparse", multiply_sparse)
    assert all(outcome.ok for outcome in verify_command.run(dtypes=[FLOAT32]))

    def constants(found: set[Kernel], kind: type, *names: str) -> set[tuple[Any, ...]]:
        return {tuple(getattr(c, n) for n in names) for c in found if isinstance(c, kind)}

    every = set(_kernel_index.every((FLOAT32,)))
    for kind, *names in (
        (GemmSimt, "lanes", "cols"),
        (GemmSimt, "rows"),
        (GemmSimt, "types"),
        (Spmv, "lanes"),
        (Spmv, "types"),
        (array_kernels.Segment, "operation", "lanes"),
    ):
        assert constants(met, kind, *names) == constants(every, kind, *names), (kind, names)
    assert {c.block_r > 0 for c in met if isinstance(c, SpgemmSimt)} == {
        False,
        True,
    }  # sizes compiled in, or not
    run_time = {c.lanes for c in every if isinstance(c, Spmv) and not c.block_r}
    assert {c.lanes for c in met if isinstance(c, Spmv) and not c.block_r} == run_time


def test_verify_on_a_gpu_that_is_not_there_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_command, "cuda_problem", lambda: "a CUDA device (none)")
    with pytest.raises(SystemExit) as stop:
        main(["verify", "--device", "cuda"])
    assert stop.value.code == 2
    assert "missing a CUDA device" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- compile
def test_compile_fills_the_cache_once(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cupy")
    command = ["compile", "--arch", "sm_80", "--arch", "sm_90a", "--kernel", "expand"]
    assert main(command) == 0
    assert "4 built, 0 cached" in capsys.readouterr().out
    entries = sorted(cache_dir.iterdir())
    assert len(entries) == 4
    assert main(command) == 0
    assert "0 built, 4 cached" in capsys.readouterr().out
    assert sorted(cache_dir.iterdir()) == entries


def test_what_was_compiled_ahead_is_what_a_product_asks_for(cache_dir: Path) -> None:
    pytest.importorskip("cupy")
    float64, int32 = np.dtype(np.float64), np.dtype(np.int32)
    names = element_types.types(*[float64] * 4, int32)
    spec = SpmvSmall.best(Problem("sm_90a", names, 3, 3, 1, 1, 99, 99, 27 * 99, False, "F", "F", True, True)).spec()
    assert spec in compile_command.specs()
    compile_command.build_all([("sm_90a", spec)], lambda summary: None)
    assert jit.build_report(spec, "sm_90a").cached


def test_compile_lists_without_compiling(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--list", "--dtype", "float16", "--kernel", "spgemm_simt"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    alone = "those with sm90 in their name, attention_values, most of attention_backward_begin and _end"
    assert last == f"{len(lines)} kernels; {alone} for sm_90a alone"
    assert lines and all(line.startswith("spgemm_simt.cu:spgemm_simt -DELEMENT_A=f16") for line in lines)
    assert not cache_dir.exists()


def test_all_means_every_config() -> None:
    everything = compile_command.specs([str(dtype) for dtype in DEVICE_DTYPES], every=True)
    assert set(everything) == {kernel.spec() for kernel in _kernel_index.every(DEVICE_DTYPES)}
    assert len(set(everything)) == len(everything)
    assert set(compile_command.specs()) < set(everything)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--arch", "sm_91"], "'sm_91'"),
        (["--arch", "hopper"], "'hopper'"),
        (["--arch", "sm_80", "--dtype", "float17"], "'float17'"),
        (["--arch", "sm_80", "--kernel", "gemm"], "'gemm'"),
    ],
)
def test_compile_refuses_what_it_does_not_know(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cupy")
    with pytest.raises(SystemExit) as stop:
        main(["compile", *arguments])
    assert stop.value.code == 2
    assert named in capsys.readouterr().err


def test_compile_without_a_gpu_asks_for_a_target(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_command, "cuda_problem", lambda: "a CUDA device (none)")
    with pytest.raises(SystemExit):
        main(["compile"])
    assert "sm_90a" in capsys.readouterr().err


def test_a_kernel_that_does_not_compile_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cupy")
    broken = jit.KernelSpec("expand.cu", "expand", (("INDEX", "nonsense"),))
    good = array_kernels.Expand("i32").spec()
    monkeypatch.setattr(compile_command, "common_specs", lambda *args, **kwargs: [broken, good])
    assert main(["compile", "--arch", "sm_80"]) == 1
    captured = capsys.readouterr()
    assert "1 built, 0 cached, 1 failed" in captured.out
    assert "nonsense" in captured.err


def test_a_cache_that_cannot_be_written_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cupy")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="CUPY_CACHE_DIR"):
        assert main(["compile", "--arch", "sm_80", "--kernel", "expand"]) == 1
    assert "CUPY_CACHE_DIR" in capsys.readouterr().err


def test_an_interrupt_keeps_what_was_built(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cupy")
    real = compile_command.build_all

    def interrupted(jobs: Any, step: Any) -> compile_command.Summary:
        def stop(summary: compile_command.Summary) -> None:
            raise KeyboardInterrupt

        return real(jobs, stop, threads=1)

    monkeypatch.setattr(compile_command, "build_all", interrupted)
    assert main(["compile", "--arch", "sm_80", "--kernel", "spgemm_simt", "--dtype", "float32"]) == 130
    others = len(set(SpgemmSimt.every((FLOAT32,)))) - 1
    assert f"1 built, 0 cached, stopped with {others} left" in capsys.readouterr().out
    monkeypatch.setattr(compile_command, "build_all", real)
    assert main(["compile", "--arch", "sm_80", "--kernel", "spgemm_simt", "--dtype", "float32"]) == 0
    assert "0 built, 0 cached" not in capsys.readouterr().out


# ---------------------------------------------------------------------------------- the command
def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bsrgemm", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("bsrgemm ")


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = f"{sys.executable} -m bsrgemm verify --device cpu | head -1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("seed") and not done.stderr
