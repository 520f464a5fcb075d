"""Old and new tree of bsrgemm on one card, the same cases in turn: does the new one lose anything?

``python bench/run/compare.py OLD NEW``; ``--help`` lists the other options.
"""

import sys

from bsrgemm._benchmark.measure.compare import main

if __name__ == "__main__":
    sys.exit(main())
