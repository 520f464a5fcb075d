"""Errors written by hand: those that a review once made and no test noticed, and others of their kind.

Each has a pattern of files, the text that is replaced, which stands once in them, and what it becomes.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

from .sites import Site


class Error(NamedTuple):
    """In the one file that has `old`, `new` in its place."""

    what: str
    files: str
    old: str
    new: str


ERRORS: tuple[Error, ...] = (
    # ------------------------------------------------------------------------------------------------- the array
    Error(
        "an integer matrix takes quotients in place",
        "bsrgemm/_array/*.py",
        'self.dtype, "same_kind")',
        'self.dtype, "unsafe")',
    ),
    Error(
        "a column with duplicates is said to have none",
        "bsrgemm/_array/*.py",
        "return self._new(other._blocks, other._shape)",
        "return self._new(other._blocks, other._shape, canonical=True)",
    ),
    Error(
        "a Kronecker product forgets the other index dtype",
        "bsrgemm/_array/*.py",
        "structure.index_dtype(max(*shape, total), a.indices, a.indptr, b.indices, b.indptr)",
        "structure.index_dtype(max(*shape, total), a.indices, a.indptr)",
    ),
    Error(
        "a Kronecker product with many columns has narrow indices",
        "bsrgemm/_array/*.py",
        "structure.index_dtype(max(*shape, total), a.indices",
        "structure.index_dtype(total, a.indices",
    ),
    Error(
        "a Kronecker product with a dense matrix has narrow indices",
        "bsrgemm/_array/*.py",
        "structure.index_dtype(max(*shape, n), a.indices, a.indptr)",
        "structure.index_dtype(n)",
    ),
    # ------------------------------------------------------------------------------------- structure and the host
    Error(
        "a sum forgets the other index dtype",
        "bsrgemm/_backend/structure.py",
        "dtype = index_dtype(len(keys), a.indices, b.indices)",
        "dtype = index_dtype(len(keys), a.indices)",
    ),
    Error(
        "duplicates are added in any order",
        "bsrgemm/_backend/structure.py",
        'order = xp.argsort(keys, kind="stable")\n    keys = keys[order]\n'
        "    starts = first_of_runs(backend, keys)\n    summed",
        "order = xp.argsort(keys[::-1])[::-1]\n    order = len(keys) - 1 - order[::-1]\n    keys = keys[order]\n"
        "    starts = first_of_runs(backend, keys)\n    summed",
    ),
    Error(
        "elements at one place are added backwards",
        "bsrgemm/_backend/structure.py",
        'order = xp.argsort(element, kind="stable")',
        'order = len(element) - 1 - xp.argsort(element[::-1], kind="stable")',
    ),
    Error("beta = -1 is taken for 1 in the loops", "bsrgemm/_*/*.py", "if beta != 1:", "if beta not in (1, -1):"),
    Error("alpha = -1 is taken for 1 in the loops", "bsrgemm/_*/*.py", "(flat if alpha == 1 else -flat)", "flat"),
    Error(
        "elements of a wide matrix are counted in 32 bits",
        "bsrgemm/_*/*.py",
        "np.iinfo(indices.dtype).max else np.dtype(np.int64)",
        "np.iinfo(indices.dtype).max else np.dtype(np.int32)",
    ),
    Error(
        "a result may lie over indptr",
        "bsrgemm/_products/engine.py",
        "arrays = (X, A.data, A.indices, A.indptr)",
        "arrays = (X, A.data, A.indices)",
    ),
    # --------------------------------------------------------------------------------------------------- products
    Error(
        "a plan compares no row pointers",
        "bsrgemm/_products/spgemm.py",
        'zip(("indices", "indptr"), (indices, indptr), wanted.copies, strict=True)',
        'zip(("indices",), (indices, indptr), wanted.copies, strict=False)',
    ),
    Error(
        "a pattern compares no row pointers",
        "bsrgemm/_products/sddmm.py",
        'for array in ("indices", "indptr"):',
        'for array in ("indices",):',
    ),
    Error(
        "pieces of long rows leave the blocks",
        "bsrgemm/_products/work_list.py",
        "start = xp.clip(indptr.astype(np.int64), 0, blocks)",
        "start = indptr.astype(np.int64)",
    ),
    Error(
        "more tiles than 31 bits count",
        "bsrgemm/_products/*.py",
        "and (rows // 16 + 1) * (problem.N // 64 + 1) * problem.batches < 2**31",
        "",
    ),
    Error("the tail of K is forgotten", "bsrgemm/_products/*.py", "tail = K % depth", "tail = 0"),
    Error(
        "a measured choice forgets the last field",
        "bsrgemm/_products/measured.py",
        "rest if parts == 1",
        "rest[:-1] if parts == 1",
    ),
    # ----------------------------------------------------------------------------------------------------- launches
    Error(
        "nobody waits for the event of another stream",
        "bsrgemm/_*/*.py",
        "                cupy.cuda.get_current_stream().wait_event(event)\n",
        "                pass\n",
    ),
    Error(
        "an event is forgotten before it is done",
        "bsrgemm/_*/*.py",
        "            if event.done:\n",
        "            if True:\n",
    ),
    Error(
        "the extent of the indices is not known",
        "bsrgemm/_*/*.py",
        "self.extents = tuple(self._backend.extent(x) for x in given)",
        "self.extents = tuple(self._backend.extent(x) for x in (given[0], given[0], given[2]))",
    ),
    Error(
        "rows may be any number of bytes apart",
        "bsrgemm/_*/*.py",
        "if col == size and row % 16 == 0 and size * cols <= row < _MOST_PITCH:",
        "if col == size and row % 16 == 0 and size * cols <= row:",
    ),
    Error(
        "columns may be any number of bytes apart",
        "bsrgemm/_*/*.py",
        "if row == size and col % 16 == 0 and size * rows <= col < _MOST_PITCH:",
        "if row == size and col % 16 == 0 and size * rows <= col:",
    ),
    Error(
        "rows may lie over each other",
        "bsrgemm/_*/*.py",
        "if col == size and row % 16 == 0 and size * cols <= row < _MOST_PITCH:",
        "if col == size and row % 16 == 0 and row < _MOST_PITCH:",
    ),
    # ---------------------------------------------------------------------------------------------------- attention
    Error(
        "attention forgets the strides of its result",
        "bsrgemm/_attention/*.py",
        "q.strides, k.strides, v.strides, out.strides,\n        score_mode,",
        "q.strides, k.strides, v.strides,\n        score_mode,",
    ),
    Error(
        "attention forgets the dtype of its result",
        "bsrgemm/_attention/*.py",
        "        q.dtype, out.dtype, call.acc, q.shape",
        "        q.dtype, call.acc, q.shape",
    ),
    Error(
        "every head has its own pattern",
        "bsrgemm/_attention/*.py",
        "0 if H == 1 else heads // H",
        "0 if H == 1 else 1",
    ),
    Error("batches share a pattern", "bsrgemm/_attention/*.py", "shared = (H, int(B > 1),", "shared = (H, 0,"),
    Error(
        "one list of blocks is walked by sequences",
        "bsrgemm/_attention/decode*.py",
        "return batch if B > 1 else 0, head if H > 1 else 0, entry",
        "return batch, head if H > 1 else 0, entry",
    ),
    Error(
        "one list of blocks is walked by heads",
        "bsrgemm/_attention/decode*.py",
        "return batch if B > 1 else 0, head if H > 1 else 0, entry",
        "return batch if B > 1 else 0, head, entry",
    ),
    Error(
        "too few counters for pieces",
        "bsrgemm/_attention/decode*.py",
        "counters=batch * heads if pieces > 1 else 0",
        "counters=heads if pieces > 1 else 0",
    ),
    Error(
        "too little room for pieces",
        "bsrgemm/_attention/decode*.py",
        "batch * heads * pieces * config.rows * (D_v + 2) if pieces > 1 else 0",
        "batch * heads * config.rows * (D_v + 2) if pieces > 1 else 0",
    ),
    # ------------------------------------------------------------------------------------------------------ Kernels
    Error(
        "a maximum that is NaN is forgotten",
        "cuda/segment.cu",
        "if (is_nan(b)) return kIgnoreNan ? a : b;",
        "if (is_nan(b)) return a;",
    ),
    Error(
        "complex numbers are compared by their real parts",
        "cuda/segment.cu",
        "return a.re < b.re || (a.re == b.re && a.im < b.im);",
        "return a.re < b.re;",
    ),
    Error(
        "a lane without a row says 0",
        "cuda/segment.cu",
        "if (any && other_any) acc =",
        "if (true) acc =",
    ),
    Error(
        "an order that was spoiled is believed",
        "cuda/segment.cu",
        "if (!in_range(row, rows)) continue;",
        "",
    ),
    Error(
        "the ticket of a sum is not reset",
        "cuda/vector_steps.cu",
        "if (smem_last) *s.arrived = 0;",
        "",
    ),
    Error(
        "an inner product conjugates nothing",
        "cuda/vector_steps.cu",
        "multiply_add(conjugate(mine), other",
        "multiply_add(mine, other",
    ),
    Error(
        "elements after the end are counted",
        "cuda/vector_steps.cu",
        "if (kWhole || i + k < s.n) sums",
        "sums",
    ),
    Error(
        "the ticket of a tile of keys is not reset",
        "cuda/attention_backward_sm90.cu",
        "if (shared.is_last) *ticket = 0;",
        "",
    ),
    Error(
        "a share begins with the turns of the first",
        "cuda/common/attention_backward_turns.cuh",
        "s.skipped = int(i64(s.count) * s.number / p.shares);",
        "s.skipped = 0;",
    ),
    Error(
        "the counter of pieces is not reset",
        "cuda/decode.cu",
        "if (is_last) *arrived = 0;",
        "",
    ),
    Error(
        "pieces are added without their weights",
        "cuda/decode.cu",
        "const f32 weight = weights[first + i];",
        "const f32 weight = 1.f;",
    ),
    Error(
        "a page out of range is read",
        "cuda/decode.cu",
        "min(max(p.table[i64(batch) * p.table_width + key / p.page], 0), p.pages - 1)",
        "max(p.table[i64(batch) * p.table_width + key / p.page], 0)",
    ),
    Error(
        "values that a query does not see are multiplied by 0",
        "cuda/decode.cu",
        "if (masked && p.queries > 1)",
        "if (false)",
    ),
    Error(
        "a pair out of range is multiplied",
        "cuda/block_products_sm90.cu",
        "block_b = int(in_range(right, problem.b_blocks) ? i64(right) : problem.b_blocks);",
        "block_b = int(right);",
    ),
    Error(
        "a block of the result without pairs is not zero",
        "cuda/block_products_sm90.cu",
        "if (begin == end) sums[h][i] = 0;",
        "",
    ),
    Error(
        "the last columns of a block are stored beside it",
        "cuda/block_products_sm90.cu",
        "if (part >= x.end || column >= problem.N) return nullptr;",
        "if (part >= x.end) return nullptr;",
    ),
    Error(
        "stages are released before they are read",
        "cuda/block_products_sm90.cu",
        "wgmma_wait<1>();\n      if (threadIdx.x % 32 == 0) arrive(shared.empty[(i - 1) % kStages]);",
        "if (threadIdx.x % 32 == 0) arrive(shared.empty[i % kStages]);",
    ),
    Error(
        "the tail of K is multiplied whole",
        "cuda/gemm_sm90.cu",
        "if (kTail > 0 && k + kDepth > K) multiply<kTail / MMA_K>(sums, a, b, any);\n        else",
        "",
    ),
    Error(
        "sums that an absent block spoiled are stored",
        "cuda/gemm_sm90.cu",
        "if constexpr (kFromRegisters) spoiled.look_at(sums);",
        "",
    ),
    Error(
        "a mask of another head is read",
        "cuda/common/attention.cuh",
        "(a.pattern_group ? x.head / a.pattern_group : 0)",
        "(a.pattern_group ? x.head : 0)",
    ),
    Error(
        "sums climb before they fade",
        "cuda/attention_sm80.cu",
        "total[m][0] *= fade[m][0], total[m][1] *= fade[m][1];",
        "",
    ),
)


def place(root: Path, error: Error) -> Site | None:
    """Where an error is made; None if its text is not there exactly once."""
    found = []
    for path in sorted(root.glob(error.files)):
        text = path.read_text(encoding="utf-8")
        if error.old in text:
            found.append((path, text))
    if len(found) != 1 or found[0][1].count(error.old) != 1:
        return None
    path, text = found[0]
    start = text.index(error.old)
    end = start + len(error.old)
    lines = (text.count("\n", 0, start) + 1, text.count("\n", 0, end) + 1)
    if path.suffix == ".py":
        lines = (_statement(text, lines[0]), lines[1])
    return Site(str(path.relative_to(root)), f"by hand: {error.what}", start, end, error.new, *lines)


def _statement(text: str, line: int) -> int:
    """The first line of the statement to which a line belongs: a test that executes it has that one in its list."""
    around = [n.lineno for n in ast.walk(ast.parse(text)) if isinstance(n, ast.stmt) and n.lineno <= line]
    return max(around, default=line)


def sites(root: Path) -> list[Site]:
    """The errors that can be made in this tree."""
    return [site for error in ERRORS if (site := place(root, error)) is not None]
