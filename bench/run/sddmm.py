"""X @ Y on the blocks of a pattern: how fast, beside dense cuBLAS and torch's sampled_addmm.

``python bench/run/sddmm.py --help`` lists the options.
"""

from bsrgemm._benchmark.measure.sddmm import main

if __name__ == "__main__":
    main()
