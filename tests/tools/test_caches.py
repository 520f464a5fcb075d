"""Every cache of the package is listed here with what its value depends on, and has that in its key.

A cache that is not listed fails the first test: whoever adds one says what it depends on, and adds a test that changes
one of these things at a time.
"""

from __future__ import annotations

import ast
from pathlib import Path

import bsrgemm

PACKAGE = Path(bsrgemm.__file__).parent
_DECORATORS = {"cache", "lru_cache", "remembered", "cached_property"}

#: module: name -> what the value depends on, all of it in the key; where a test changes one at a time.
CACHES: dict[str, dict[str, str]] = {
    "_kernels/card.py": {"_described": "device", "reaches": "two architectures"},
    "_kernels/launch.py": {
        "Launch._arguments": "addresses of the operands; numbers and scratch memory are compared at each start: "
        "kernels/test_public_calls.py",
        "Calls._found": "what the door of a call says of its kind: kernels/test_public_calls.py",
    },
    "_kernels/disk_cache.py": {
        "_memory": "the contents",
        "_folders": "device and number of the folder on its disk, compared with the open folder at each use",
    },
    "_kernels/element_types.py": {
        "accumulator": "the dtype",
        "number": "the name of a type",
        "types": "five dtypes",
    },
    "_kernels/driver.py": {"_library": "the process", "_libc": "the process"},
    "_kernels/graphs.py": {
        "_captures": "the driver's number of the capture: kernels/test_workspace.py, gpu/test_graph_memory.py",
        "_reserves": "device",
        "Capture._kept": "the object itself",
        "Capture._counters": "the driver's number of the stream, in one capture: kernels/test_workspace.py",
    },
    "_kernels/jit.py": {
        "_kernels": "spec with all definitions and structs, architecture, folder of sources and device: "
        "kernels/test_jit.py",
        "_locks": "as _kernels",
        "_device_targets": "the device: kernels/test_jit.py",
        "_argument_class": "nothing",
    },
    "_kernels/kernel.py": {"_spec": "the kernel with all its fields"},
    "_kernels/structs.py": {
        "_patch": "the struct and the names of fields",
        "Struct.offsets": "the fields",
        "Struct._packer": "the fields",
        "Struct._has_complex": "the fields",
        "Struct.alignment": "the fields",
        "Struct.size": "the fields",
    },
    "_kernels/tensor_map.py": {
        "_driver_arguments": "dtype, sizes, strides, box, swizzle and promotion: kernels/test_tensor_map.py",
        "dtype_name": "the dtype",
    },
    "_kernels/timing.py": {"_sleep_kernel": "device"},
    "_kernels/workspace.py": {
        "_zeroed": "device and the driver's number of the stream: kernels/test_workspace.py",
        "_Answers.by_device": "thread and device",
    },
    "_backend/base.py": {"EngineTable._engines": "the name of the backend"},
    "_backend/registry.py": {"_BACKENDS": "the class of an object", "_CUDA": "the process", "host": "the process"},
    "_backend/threads.py": {"_blas": "the process"},
    "_backend/array_kernels.py": {
        "segment": "dtype, operation, mean length and width",
        "vector_step": "operation and two dtypes: kernels/test_vector_steps.py",
    },
    "_backend/device_arrays.py": {"_ready": "the device, and all that decides the kernel"},
    "_backend/index_arrays.py": {"Unwritten.lists": "the two index arrays, while nobody writes into them"},
    "_array/arrays.py": {"_public": "array or matrix", "_leaves": "backend, array or matrix"},
    "_products/arguments.py": {
        "product": "the type of sums",
        "mend": "the type of sums",
        "gemm_sm80": "the type of sums",
        "gemm_sm90": "nothing",
    },
    "_products/call.py": {
        "UnlistedPattern._whole": "the pattern of one plan, which refuses index arrays that were written to"
    },
    "_products/matmul.py": {
        "_check_held": "dtype, backend and name",
        "product_dtypes": "three dtypes",
        "_default_precision": "the environment variable as it was first read, as documented",
    },
    "_products/operand.py": {
        "Operand._entries": "the arrays of the matrix, which are watched, and what is in the key of each entry: "
        "products/test_operand.py",
    },
    "_products/filled.py": {"_divisor": "two numbers"},
    "_products/gemm_sm80.py": {"_writer_of_sums": "the type of sums"},
    "_products/prepared.py": {"fastest": "the problem and the card"},
    "_products/pairs.py": {"_computed": "sides, dtypes, counts, alignment, what is forced, and the card"},
    "_products/sampled_dense.py": {"_multiplying": "the problem and the card"},
    "_products/sparse_dense.py": {"_chosen": "sides, counts, dtypes, alignment, the forced kernel, and the card"},
    "_products/spgemm_pattern.py": {"Listing.launches": "the forced kernel and the device, of two arrays"},
    "_products/spmm.py": {
        "spmm_small": "types, sizes and layout",
        "spmm_staged": "types, sizes and shared memory",
        "spmm_f64": "index type and sizes",
    },
    "_products/spmv_small.py": {"spmv_small": "types, sizes, layout and row length"},
    "_products/tuned.py": {
        "_loaded": "the file, whose name has the card: products/test_tuned.py",
        "_card_name": "device",
    },
    "_attention/arguments.py": {
        "attention": "the type of sums",
        "attention_sm90": "nothing",
        "backward": "the type of sums",
        "backward_rows": "nothing",
        "backward_sm90": "nothing",
    },
    "_attention/checks.py": {"dtypes_of": "five dtypes", "fp8_dtypes": "five dtypes", "sizes_of": "three shapes"},
    "_attention/host_tiles.py": {"hidden": "the hole; the band and the mask are those of the function it lives in"},
    "_attention/kv_cache.py": {
        "_same": "backend, dtype and sizes: kernels/test_decode.py",
        "rounded_tiles": "three numbers",
    },
    "_attention/mask_base.py": {
        "_ones_of_16_bits": "nothing",
        "_first_keys": "keys of a block",
        "BlockRows.packed": "the arrays of the object, to which nobody writes",
        "remembered_lines": "integers; every mask has a copy: attention/test_mask_intervals.py",
    },
    "_backend/numpy_backend.py": {
        "_last_valid": "identity of the arrays; their values, dtype and block columns are compared"
    },
    "linalg/graphs.py": {
        "_graphs": "method, shape and dtype of vectors, device and number of the stream; arrays, "
        " writes, shapes and plans of all matrices of A and M, numbers of M: "
        "linalg/test_graphs_between_solves.py",
    },
    "interop/mpi/ring_plan.py": {
        "bounds": "length, ranks and what chunks are multiples of",
        "_band_plan": "ring (ranks, lengths, band, alignment) and rank; masks are not kept",
    },
    "dtypes.py": {
        "_check_dtype": "dtype, list and name",
        "result_dtype": "two dtypes",
        "accumulator_dtype": "the dtype",
    },
}
#: Rooms whose caches live as long as one command.
COMMANDS = ("_cli",)


def found() -> dict[str, set[str]]:
    """Caches by module: decorated functions, and dictionaries of modules and of objects that begin empty."""
    caches: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.split("/")[0] in COMMANDS:
            continue
        tree = ast.parse(path.read_text())
        names = {f"{owner}{node.name}" for owner, node in functions(tree, "") if decorated(node)}
        for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            names |= {f"{owner.name}.{attribute}" for attribute in kept_by(owner)}
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                empty = isinstance(node.value, ast.Dict) and not node.value.keys
                later = isinstance(node.value, ast.Constant) and node.value.value is None
                if (empty or later) and node.target.id.startswith("_"):
                    names.add(node.target.id)
        if names:
            caches[name] = names
    return caches


def kept_by(owner: ast.ClassDef) -> set[str]:
    """Dictionaries and sets of an object that begin empty: ``self.x: dict = {}``, or a field of a dataclass."""
    names = set()
    for node in ast.walk(owner):
        if not isinstance(node, ast.AnnAssign):
            continue
        if isinstance(node.target, ast.Attribute) and isinstance(node.value, ast.Dict) and not node.value.keys:
            names.add(node.target.attr)
        elif isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call):
            made = [x.value for x in node.value.keywords if x.arg == "default_factory"]
            if any(isinstance(x, ast.Name) and x.id in ("dict", "set") for x in made):
                names.add(node.target.id)
    return names


def functions(node: ast.AST, owner: str) -> list[tuple[str, ast.FunctionDef]]:
    """Functions with the class that they are methods of."""
    result: list[tuple[str, ast.FunctionDef]] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            result.append((owner, child))
            result += functions(child, "")
        else:
            result += functions(child, f"{child.name}." if isinstance(child, ast.ClassDef) else owner)
    return result


def decorated(node: ast.FunctionDef) -> bool:
    names = {d.func if isinstance(d, ast.Call) else d for d in node.decorator_list}
    return any(isinstance(name, ast.Name) and name.id in _DECORATORS for name in names)


def test_every_cache_is_listed_with_what_it_depends_on() -> None:
    assert found() == {module: set(names) for module, names in CACHES.items()}


def test_every_test_that_is_named_exists() -> None:
    tests = PACKAGE.parent / "tests"
    named = {
        word.strip(",:") for names in CACHES.values() for text in names.values() for word in text.split() if "/" in word
    }
    assert named and all((tests / path).is_file() for path in named)
