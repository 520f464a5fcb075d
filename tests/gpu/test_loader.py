"""Kernels loaded through every state of the cache give the right numbers; tensor maps copy tiles.

Nothing here makes CuPy compile a kernel of its own: that needs headers which we do not.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from bsrgemm._kernels import disk_cache, jit, tensor_map
from bsrgemm._kernels.jit import KernelSpec

pytestmark = pytest.mark.gpu

AXPY = KernelSpec("axpy.cu", "axpy", (("ELEMENT", "double"), ("OFFSET", 3)))
AXPY_CU = """#include "offset.cuh"
extern "C" __global__ void axpy(ELEMENT a, const ELEMENT* x, ELEMENT* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += a * x[i] + offset();
}
"""
OFFSET_CUH = """#pragma once
__device__ ELEMENT offset() { return ELEMENT(OFFSET); }
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "cuda"
    folder.mkdir()
    (folder / "axpy.cu").write_text(AXPY_CU)
    (folder / "offset.cuh").write_text(OFFSET_CUH)
    return folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(disk_cache, "_warned", False)
    return tmp_path / "cache" / "bsrgemm"


def load_anew(root: Path, monkeypatch: pytest.MonkeyPatch):
    """The kernel as a new process would load it: neither we nor CuPy remember an earlier one."""
    import cupy

    monkeypatch.setattr(jit, "_kernels", {})
    cupy.clear_memo()
    return jit.load(AXPY, jit.device_target(), root=root)


def assert_right(kernel, offset: float = 3.0) -> None:
    import cupy

    rng = np.random.default_rng()
    x, y = rng.standard_normal((2, 1000))
    result = cupy.asarray(y)
    kernel((4,), (256,), (np.float64(2.5), cupy.asarray(x), result, np.int32(1000)))
    np.testing.assert_allclose(result.get(), y + (2.5 * x + offset), rtol=1e-14, atol=1e-14)


def test_a_kernel_compiled_now_and_one_from_the_cache_run(root: Path, folder: Path, monkeypatch) -> None:
    assert_right(load_anew(root, monkeypatch))
    assert len(os.listdir(folder)) == 1
    monkeypatch.setattr(jit, "_compile", None)  # from here on only the cache can serve
    assert_right(load_anew(root, monkeypatch))


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "foreign"])
def test_a_damaged_entry_ends_in_a_working_kernel(root: Path, folder: Path, monkeypatch, damage: str) -> None:
    load_anew(root, monkeypatch)
    (entry,) = folder.iterdir()
    if damage == "foreign":
        entry.rename(entry.with_name(f"{entry.stem[:-32]}{'0' * 32}.cubin"))
    else:
        contents = entry.read_bytes()
        entry.write_bytes({"truncated": contents[:-64], "garbage": b"not a cubin", "empty": b""}[damage])
    assert_right(load_anew(root, monkeypatch))
    assert list(folder.iterdir()) == [entry]


@pytest.mark.parametrize("memfd", [True, False])
def test_a_folder_that_cannot_be_made_ends_in_a_working_kernel(root: Path, folder: Path, monkeypatch, memfd) -> None:
    if not memfd:
        monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(disk_cache, "_memory", {})
    folder.parent.write_text("")
    with pytest.warns(RuntimeWarning, match="cannot keep compiled kernels"):
        kernel = load_anew(root, monkeypatch)
    assert_right(kernel)


def test_a_full_disk_ends_in_a_working_kernel(root: Path, folder: Path, monkeypatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        kernel = load_anew(root, monkeypatch)
    assert_right(kernel)
    assert os.listdir(folder) == []


def test_an_edited_header_is_in_the_next_kernel(root: Path, monkeypatch) -> None:
    assert_right(load_anew(root, monkeypatch))
    (root / "offset.cuh").write_text(OFFSET_CUH.replace("OFFSET", "OFFSET + 1"))
    assert_right(load_anew(root, monkeypatch), offset=4.0)


def test_threads_share_one_kernel_and_all_get_right_numbers(root: Path, monkeypatch) -> None:
    import cupy

    monkeypatch.setattr(jit, "_kernels", {})
    cupy.clear_memo()
    arch = jit.device_target()
    failures: list[BaseException] = []
    kernels: list[object] = []

    def work() -> None:
        try:
            kernels.append(jit.load(AXPY, arch, root=root))
            assert_right(kernels[-1])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(kernels) == 8 and len(set(map(id, kernels))) == 1


CHILD = """
import sys, time
from pathlib import Path
import cupy
import numpy as np
from bsrgemm._kernels import jit

spec = jit.KernelSpec("axpy.cu", "axpy", (("ELEMENT", "double"), ("OFFSET", 3)))
x, y = cupy.asarray(np.ones(8)), cupy.asarray(np.zeros(8))
cupy.cuda.Device().synchronize()
start = time.perf_counter()
kernel = jit.load(spec, jit.device_target(), root=Path(sys.argv[1]))
seconds = time.perf_counter() - start
kernel((1,), (8,), (np.float64(2), x, y, np.int32(8)))
assert (y.get() == 5).all(), y
print(seconds)
"""


def child(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(jit.__file__).parents[1],
    )


def seconds_of(process: subprocess.Popen[str]) -> float:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "cannot keep compiled kernels" not in err
    return float(out)


def test_processes_racing_all_run_the_kernel_and_leave_one_entry(root: Path, folder: Path) -> None:
    for process in [child(root) for _ in range(3)]:
        seconds_of(process)
    assert len(os.listdir(folder)) == 1


def test_a_cached_kernel_loads_in_a_new_process_within_100_ms(root: Path) -> None:
    jit.build(AXPY, jit.device_target(), root=root)
    assert min(seconds_of(child(root)) for _ in range(3)) <= 0.1


COPY_CU = """struct alignas(64) TensorMap { unsigned long long opaque[16]; };

extern "C" __global__ void copy_tile(const __grid_constant__ TensorMap map, int x, int y, uint4* out) {
  __shared__ alignas(1024) uint4 tile[TILE_BYTES / 16];
  __shared__ alignas(8) unsigned long long arrived;
  const unsigned barrier = static_cast<unsigned>(__cvta_generic_to_shared(&arrived));
  const unsigned destination = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(TILE_BYTES)
                 : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];"
        ::"r"(destination), "l"(&map), "r"(x), "r"(y), "r"(barrier) : "memory");
  }
  unsigned done = 0;
  for (int tries = 0; !done && tries < 10000; ++tries)  // a copy that never arrives fails the test, no more
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.b32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(barrier) : "memory");
  if (done)
    for (int i = threadIdx.x; i < TILE_BYTES / 16; i += blockDim.x) out[i] = tile[i];
}
"""


def unswizzled(tile: np.ndarray) -> np.ndarray:
    """A tile of 128-byte rows as it was: its 16-byte chunk c of row r lies at chunk c ^ (r % 8)."""
    rows = len(tile)
    chunks = tile.view(np.uint8).reshape(rows, 8, 16)
    order = np.arange(8) ^ (np.arange(rows) % 8)[:, None]
    return np.take_along_axis(chunks, order[:, :, None], axis=1).reshape(rows, 128).view(tile.dtype)


@pytest.mark.parametrize("swizzle", ["none", "128B"])
@pytest.mark.parametrize("dtype_name", ["float16", "float32", "uint8"])
def test_a_tensor_map_by_value_copies_tiles_with_zeros_outside(tmp_path: Path, dtype_name: str, swizzle: str) -> None:
    import cupy

    if int(cupy.cuda.Device().compute_capability) < 90:
        pytest.skip("tensor maps need compute capability 9.0")
    (tmp_path / "copy.cu").write_text(COPY_CU)
    dtype = np.dtype(dtype_name)
    rows, width, height, tall = 100, 128 // dtype.itemsize, 70, 32
    columns = 3 * width - 5  # the last tile of a row hangs over the edge; the rows are padded to 3 * width
    padded = np.random.default_rng().integers(1, 200, (rows, 3 * width)).astype(dtype)
    matrix = padded[:height, :columns]
    device = cupy.asarray(padded)
    layout = tensor_map.Layout(dtype_name, (columns, height), (device.strides[0],), (width, tall), swizzle)
    encoded = jit.argument(bytearray(layout.at(device.data.ptr)))
    spec = KernelSpec("copy.cu", "copy_tile", (("TILE_BYTES", 128 * tall),))
    kernel = jit.load(spec, jit.device_target(), root=tmp_path)
    for x, y in ((0, 0), (width, tall), (2 * width, 2 * tall), (16 // dtype.itemsize, 3), (-16 // dtype.itemsize, -3)):
        out = cupy.asarray(np.full((tall, width), 255, dtype))
        kernel((1,), (128,), (encoded, np.int32(x), np.int32(y), out))
        tile = unswizzled(out.get()) if swizzle == "128B" else out.get()
        expected = np.zeros((tall, width), dtype)
        part = matrix[max(y, 0) : y + tall, max(x, 0) : x + width]
        top, left = max(-y, 0), max(-x, 0)
        expected[top : top + part.shape[0], left : left + part.shape[1]] = part
        np.testing.assert_array_equal(tile, expected, err_msg=f"tile at {x}, {y}")
