"""The argument structs of the product kernels. Their fields are those of cuda/common/bsr.cuh and of the kernels."""

from __future__ import annotations

from functools import cache
from typing import Any

from .._kernels.element_types import number
from .._kernels.structs import Complex, Struct, TensorMap, fields

#: Field type of alpha and beta, by the NumPy type character of the accumulator.
_FACTORS: dict[str, Any] = {
    "f": "f", "d": "d", "F": Complex("f"), "D": Complex("d"), "I": "I", "L": "Q", "Q": "Q", "?": "?",
}  # fmt: skip

#: The work list of a pattern. The last three fields point to temporary memory, which differs between launches.
SCHEDULE = Struct("Schedule", fields("P", "items splits count columns blocks row_tiles counters partial arrived"))

#: For spmv_small: the pieces of block rows that are too long for one group of lanes, and the block rows of each CTA.
LONG_ROWS = Struct("LongRows", fields("P", "pieces parents count bounds partial arrived"))

BLOCK_PRODUCTS_SM90 = Struct(
    "BlockProductsSm90",
    (
        *fields(TensorMap(), "a b"),
        *fields("P", "out left right starts counters"),
        *fields("q", "blocks pairs a_blocks b_blocks"),
        *fields("i", "R N K narrow row_blocks"),
    ),
)

BLOCK_PRODUCTS_SM80 = Struct(
    "BlockProductsSm80",
    (
        *fields("P", "a b out left right starts"),
        *fields("q", "blocks pairs a_blocks b_blocks a_line b_line a_block b_block"),
        *fields("i", "R N K"),
    ),
)

#: The argument of fill, which fills a matrix up with zeros.
FILL = Struct(
    "Fill",
    (
        *fields("P", "data indices indptr places to twice"),
        *fields("q", "block_rows block_cols blocks wide line"),
        *fields("i", "R K high parts window windows lanes"),
    ),
)

BLOCK_PATTERN = Struct("BlockPattern", (*fields("P", "indices indptr"), *fields("q", "rows blocks")))

SPGEMM_PATTERN = Struct(
    "SpgemmPattern",
    (
        *fields(BLOCK_PATTERN, "a b"),
        *fields("q", "columns"),
        *fields("P", "before most left right column start count indices starts counters sums totals"),
        *fields("q", "most_pairs most_columns"),
        *fields("P", "bits places"),
        *fields("i", "slots listed"),
    ),
)

#: The argument of take_blocks, which takes the blocks of a sparse product from a dense one.
TAKE_BLOCKS = Struct(
    "TakeBlocks",
    (
        *fields("P", "data indices indptr b full out places bits"),
        *fields("q", "blocks a_blocks a_rows b_rows columns b_row full_row"),
        *fields("i", "R K N words"),
    ),
)

#: A sparsity pattern whose two index arrays are contiguous and have the same dtype.
STORED_PATTERN = Struct(
    "StoredPattern", (*fields("P", "indices indptr"), *fields("q", "rows columns blocks transposed"))
)

SAMPLED_TILES = Struct(
    "SampledTiles", (*fields("P", "indices indptr tiles order counts"), *fields("q", "rows columns blocks capacity"))
)

WORK_LIST = Struct(
    "WorkList",
    (
        *fields(STORED_PATTERN, "stored"),
        *fields("P", "order place row_tiles keys begun columns blocks bounds"),
        *fields("P", "lengths begun_items unsorted items splits item_count"),
        *fields("q", "count tile"),
        ("fair", "d"),
        *fields("i", "per_row per_group all_row_tiles groups block_cols alike"),
        ("least_entries", "I"),
        *fields("i", "most_pieces block_bits member_bits column_bits"),
        *fields("q", "step last_step"),
    ),
)


ROW_SHARES = Struct(
    "RowShares",
    (
        *fields("P", "indptr counted worked pieces parents count bounds"),
        *fields("q", "rows blocks tile longest piece most_pieces shares lists"),
    ),
)


@cache
def product(acc: str) -> Struct:
    """Return the argument struct of a product whose accumulator has the CUDA name `acc`."""
    return Struct(
        "Product",
        (
            *fields(_FACTORS[number(acc).char], "alpha beta"),
            *fields("P", "data indices indptr places b c"),
            *fields("q", "block_rows block_cols blocks N batches b_row b_col b_batch c_row c_col c_batch"),
            *fields("i", "R K read_c"),
        ),
    )


@cache
def mend(acc: str) -> Struct:
    """Return the argument struct of mend for the accumulator `acc`."""
    return Struct("Mend", (("product", product(acc)), ("twice", "P"), *fields("i", "each across")))


@cache
def gemm_sm80(acc: str) -> Struct:
    """Return the argument struct of gemm_sm80 for the accumulator `acc`."""
    parts = (("product", product(acc)), ("schedule", SCHEDULE))
    return Struct("GemmSm80", (*parts, *fields("i", "line high")))


@cache
def gemm_sm90() -> Struct:
    """Return the argument struct of gemm_sm90, whose accumulator is always float32."""
    maps = fields(TensorMap(), "a b c")
    parts = (("product", product("f32")), ("schedule", SCHEDULE))
    return Struct("GemmSm90", (*maps, *parts, *fields("i", "group count keep_a groups entries")))
