"""A @ A for a block-sparse A: how fast, beside dense cuBLAS, cupyx's CSR, warp (warp-lang) and SciPy.

``python bench/run/spgemm.py --help`` lists the options.
"""

from bsrgemm._benchmark.measure.spgemm import main

if __name__ == "__main__":
    main()
