"""X @ Y on the blocks of a pattern: how fast, beside dense cuBLAS and torch's sampled_addmm.

``python bench/run/sddmm.py --help`` says what can be asked for.
"""

from bsrgemm._benchmark.measure.sddmm import main

if __name__ == "__main__":
    main()
