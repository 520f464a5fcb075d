"""The same products and attentions by other libraries."""
