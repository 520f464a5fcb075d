"""A @ x and A @ X for small blocks: how near to the bandwidth of a copy, beside cuSPARSE, warp, cupyx and SciPy.

``python bench/run/spmv.py --help`` lists the options.
"""

from bsrgemm._benchmark.measure.spmv import main

if __name__ == "__main__":
    main()
