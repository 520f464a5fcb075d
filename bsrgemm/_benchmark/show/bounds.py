"""Bounds that are judged both where attention is measured and where its tables are made."""

#: The largest error over that of the best peer
MOST_ERROR = 1.2
#: The time at a density over that share of full attention, and seconds on top of it
MOST_COST, MOST_START = 1.10, 20e-6
#: Bytes beside the operands
MOST_BYTES = 2e6
