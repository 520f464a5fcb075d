"""What each kernel is made of: its sources and the Python code that launches it, and a digest of both."""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from pathlib import Path

import bsrgemm
from bsrgemm._kernels import sources

PACKAGE = Path(bsrgemm.__file__).parent

_PRODUCT = (
    *("prepared.py:MatrixCache", "jit.py:argument"),
    *(f"launch.py:{x}" for x in ("Launch", "product", "_launch", "_words", "_plan", "_packing")),
    "tuning.py:gemm",
)

_FEW = (*(f"tuning.py:{x}" for x in ("plain", "_by_rows", "_staged")), "launch.py:_order")

_ATTENTION = (
    *(f"attention_launch.py:{x}" for x in ("forward", "_plan", "_mappable", "_is_fine", "_mask_tiles")),
    *("attention_launch.py:_readable", "scratch.py:kept"),
    *(f"attention_tuning.py:{x}" for x in ("forward", "candidates", "section", "scores", "wants_copies", "_types")),
    *(f"mask_tiles.py:{x}" for x in ("tiles", "sequences", "_order", "_spanned", "_touched", "_blocks_in")),
)

#: kernel -> (source, the Python definitions that choose and launch it)
KERNELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "gemm_simt": ("gemm_simt.cu", (*_PRODUCT, "configs.py:GemmSimt", "tuning.py:spmm")),
    "gemm_sm90": (
        "gemm_sm90.cu",
        (
            *_PRODUCT,
            *("launch.py:_tensor", "launch.py:_block_map", "launch.py:_operand_maps", "launch.py:_map"),
            *("launch.py:_order", "scratch.py:counters", "scratch.py:room"),
            *(
                "configs.py:GemmSm90",
                "tuning.py:gemm_sm90",
                "tuning.py:sm90_serves",
                "schedule.py:single",
                "schedule.py:merged",
                "schedule.py:split",
                "merge_launch.py:merged",
                "merge_launch.py:whole",
            ),
        ),
    ),
    "gemm_sm80": (
        "gemm_sm80.cu",
        (*_PRODUCT, "launch.py:_tensor", "configs.py:GemmSm80", "tuning.py:gemm_sm80", "tuning.py:sm80_serves"),
    ),
    "attention_sm90": (
        "attention_sm90.cu",
        (
            *_ATTENTION,
            *("attention_tuning.py:AttentionSm90", "attention_tuning.py:_sm90_shape", "attention_tuning.py:_fp8_shape"),
            *("attention_launch.py:_maps", "attention_launch.py:_map", "attention_launch.py:_by_columns"),
            *("scratch.py:counters", "scratch.py:_reserved"),
        ),
    ),
    "attention_values": (
        "attention_values.cu",
        ("attention_launch.py:_by_columns", "scratch.py:kept", "attention_tuning.py:AttentionValues"),
    ),
    "attention_sm80": (
        "attention_sm80.cu",
        (*_ATTENTION, "attention_tuning.py:AttentionSm80", "attention_tuning.py:_roomy"),
    ),
    "attention_simt": ("attention_simt.cu", (*_ATTENTION, "attention_tuning.py:AttentionSimt")),
    "decode": (
        "decode.cu",
        (
            *(
                "decode_launch.py:Decode",
                "decode_launch.py:decode_config",
                "decode_launch.py:pieces_of",
                "decode_launch.py:_Plan",
            ),
            *(
                "decode_launch.py:_on_device",
                "decode_launch.py:_block_strides",
                "decode_launch.py:_about",
                "scratch.py:counters",
            ),
        ),
    ),
    "match": ("row_matching.cu", ("prepared.py:_matched", "merge_launch.py:stored", "configs.py:RowMatching")),
    "merge": (
        "work_list.cu",
        (*(f"merge_launch.py:{x}" for x in ("stored", "merged", "whole", "_start")), "configs.py:WorkListKernel"),
    ),
    "spmv": ("spmv.cu", (*_PRODUCT, "configs.py:Spmv", "tuning.py:spmv")),
    "spmv_small": (
        "spmv_small.cu",
        (
            *_PRODUCT,
            *("launch.py:_long", "launch.py:_shares", "scratch.py:counters", "scratch.py:room"),
            *("schedule.py:long_rows", "schedule.py:shares"),
            *("configs.py:SpmvSmall", "tuning.py:plain"),
            *("small_tuning.py:spmv_small", "tuning.py:_row"),
            *(f"small_tuning.py:{x}" for x in ("_spmv_light", "_spmv_by_rows", "_spmv_whole")),
        ),
    ),
    "spmm": (
        "spmm.cu",
        (
            *(*_PRODUCT, "configs.py:Spmm", "tuning.py:plain", *_FEW),
            *(f"small_tuning.py:{x}" for x in ("spmm_small", "spmm_staged", "_chunk")),
        ),
    ),
    "spmm_f64": (
        "spmm_f64.cu",
        (*_PRODUCT, *("configs.py:SpmmF64", *_FEW), "tuning.py:_dmma_serves", "small_tuning.py:spmm_f64"),
    ),
    "block_products_sm90": (
        "block_products_sm90.cu",
        (
            *(f"blocks_launch.py:{x}" for x in ("pair_products", "sampled", "_map", "_launch_sm90", "_l2_bytes")),
            *(
                "device.py:CupyBackend.sampled",
                "scratch.py:counters",
                "configs.py:BlockProductsSm90",
                "tuning.py:block_products_sm90",
            ),
        ),
    ),
    "block_products_sm80": (
        "block_products_sm80.cu",
        (
            *(f"blocks_launch.py:{x}" for x in ("pair_products", "sampled", "_launch_sm80")),
            *("device.py:CupyBackend.sampled", "configs.py:BlockProductsSm80", "tuning.py:block_products_sm80"),
        ),
    ),
    "pairs": (
        "spgemm_simt.cu",
        ("device.py:CupyBackend.pair_products", "prepared.py:run", "configs.py:SpgemmSimt", "tuning.py:pairs"),
    ),
    "meet": (
        "spgemm_pattern.cu",
        ("meet_launch.py:product_pattern", "meet_launch.py:_table", "configs.py:SpgemmPattern"),
    ),
    "segment": (
        "segment.cu",
        ("device.py:CupyBackend.segment_reduce", "prepared.py:run", "configs.py:Segment", "tuning.py:segment"),
    ),
    "expand": ("expand.cu", ("device.py:CupyBackend.expand", "prepared.py:run", "configs.py:Expand")),
}

#: The reports of racecheck in attention_sm90 (7, of one config, all looked up in its SASS) are of `shades` and `seen`,
#: read by all lanes of a multiplying warp and later written by feed and shade. A __syncwarp follows the reads, then one
#: lane arrives at the barrier on which feed waits; the tool seems to follow barriers by the thread that arrives.
RACES_EXPLAINED: tuple[str, ...] = ("attention_sm90",)

#: Kernels with shared memory, for which racecheck has something to look at.
SHARED_MEMORY: tuple[str, ...] = (
    *(
        "attention_sm80",
        "attention_sm90",
        "attention_values",
        "block_products_sm80",
        "block_products_sm90",
        "decode",
        "gemm_sm80",
        "gemm_sm90",
        "match",
        "meet",
        "merge",
    ),
)


def digest(kernel: str) -> str:
    """A digest that changes with the device code or the launch code, not with comments, blanks or docstrings."""
    source, definitions = KERNELS[kernel]
    parts = [sources.code_digest(sources.gather(source))]
    parts += [_definition(*where.split(":")) for where in definitions]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _definition(file: str, name: str) -> str:
    """The text of a definition without comments, docstrings and layout, the same under every Python version."""
    text = (PACKAGE / file).read_text()
    scope: ast.AST = ast.parse(text)
    for part in name.split("."):
        scope = next(
            node
            for node in ast.iter_child_nodes(scope)
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part
        )
    assert isinstance(scope, ast.FunctionDef | ast.ClassDef) and scope.end_lineno is not None
    lines: list[str] = text.splitlines()
    for node in ast.walk(scope):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            for number in range(docstring.lineno - 1, docstring.end_lineno):
                lines[number] = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and lines[token.start[0] - 1]:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    first = min([scope.lineno, *(d.lineno for d in scope.decorator_list)])
    return " ".join(" ".join(lines[first - 1 : scope.end_lineno]).split())
