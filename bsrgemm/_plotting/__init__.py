"""Pictures of patterns, drawn with matplotlib from plain arrays."""
