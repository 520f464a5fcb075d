"""The argument structs of the attention kernels, as cuda/common/attention.cuh and the kernels declare them."""

from __future__ import annotations

from functools import cache

from .._kernels.structs import Struct, TensorMap, fields

#: Distances from a batch, head, row and column to the next, in elements.
STRIDES = Struct("Strides", fields("q", "batch head row column"))

#: The argument of attention_values, which transposes values in fp8.
ATTENTION_VALUES = Struct(
    "AttentionValues",
    (*fields("P", "v to bounds"), *fields("q", "batch head row"), *fields("i", "heads keys columns room sequences")),
)

#: The argument of attention_delta, which prepares the gradients of attention.
ATTENTION_DELTA = Struct(
    "AttentionDelta",
    (
        *fields("P", "dout out lse dlse delta to"),
        *fields("q", "dout_batch dout_head dout_row dout_column out_batch out_head out_row out_column rows"),
        *fields("i", "heads queries columns"),
    ),
)

#: The argument of turn_order, which orders the entries of a mask for sums that are made in one order.
TURN_ORDER = Struct(
    "TurnOrder",
    (*fields("P", "first columns parts to_columns to_parts"), *fields("i", "tiles rows entries walkers")),
)

DECODE = Struct(
    "Decode",
    (
        *fields("P", "q k v out lse lengths table blocks partial arrived"),
        *fields("q", "q_batch q_head q_row q_col out_batch out_head out_row out_col"),
        *fields("q", "blocks_batch blocks_head blocks_entry"),
        *fields("i", "kv_heads group queries capacity pages page table_width entries block_tiles left right"),
        *fields("i", "piece_tiles"),
        *fields("f", "scale softcap inverse_softcap"),
    ),
)

#: The argument of kv_append, which adds tokens to a cache.
KV_APPEND = Struct(
    "KvAppend",
    (
        *fields("P", "k v to_k to_v lengths refused table takes arrived"),
        *fields("q", "k_batch k_head k_row k_col v_batch v_head v_row v_col"),
        *fields("i", "batch heads tokens key_dim value_dim capacity pages page table_width wide"),
    ),
)

#: Fields of `Attention` that describe a mask: pointers to its lists, and its sizes.
MASK_POINTERS = ("first", "columns", "parts", "kinds", "bits")
MASK_SIZES = (
    *("entries", "masks", "block_q", "block_k", "parts_q", "parts_k", "bit_words"),
    *("patterns", "pattern_batch", "pattern_group"),
)


@cache
def attention(acc: str) -> Struct:
    """The argument of attention kernels that compute in float32 ("f32") or float64 ("f64")."""
    return Struct(
        "Attention",
        (
            *fields("P", "q k v o lse"),
            *fields(STRIDES, "q_strides k_strides v_strides o_strides"),
            *fields("P", f"q_bounds k_bounds sequences order {' '.join(MASK_POINTERS)} counters"),
            *fields("P", "q_scale k_scale v_scale"),
            *fields({"f32": "f", "f64": "d"}[acc], "scale cap value_scale"),
            *fields("i", "batches heads group queries keys head_dim value_dim sequence_count"),
            *fields("i", "left right bottom_right tiles section backwards"),
            *fields("i", " ".join(MASK_SIZES)),
        ),
    )


@cache
def attention_sm90() -> Struct:
    """The argument of attention_sm90: the tensor maps of the operands, followed by `Attention`."""
    return Struct("AttentionSm90", (*fields(TensorMap(), "q k v o"), ("attention", attention("f32"))))


@cache
def backward(acc: str) -> Struct:
    """The argument of the kernels for gradients: `Attention`, followed by the arrays that only they have."""
    return Struct(
        "Backward",
        (
            ("attention", attention(acc)),
            *fields("P", "dout statistics dq dk dv"),
            *fields(STRIDES, "dout_strides dq_strides dk_strides dv_strides"),
            *fields({"f32": "f", "f64": "d"}[acc], "factor inverse_cap"),
        ),
    )


@cache
def backward_rows() -> Struct:
    """The argument of the kernels for gradients on Hopper: `Backward`, followed by what belongs to queries."""
    return Struct(
        "BackwardRows",
        (
            ("backward", backward("f32")),
            *fields("P", "out lse dlse delta"),
            *fields(STRIDES, "out_strides"),
            *fields("P", "logarithms deltas sums turns row_first row_columns partials"),
            *fields("i", "padded whole shares"),
        ),
    )


@cache
def backward_sm90() -> Struct:
    """The argument of attention_backward_sm90: the tensor maps of the operands, followed by `BackwardRows`."""
    return Struct("BackwardSm90", (*fields(TensorMap(), "q k v dout"), ("rows", backward_rows())))
