"""A @ B for a block-sparse A: bsrgemm beside what NumPy, SciPy and CuPy users have today.

``python bench/run/matmul.py --help`` lists the options.
"""

from bsrgemm._benchmark.measure.matmul import main

if __name__ == "__main__":
    main()
