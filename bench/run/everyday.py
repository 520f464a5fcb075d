"""Everyday operations on the CPU beside those of scipy's bsr_array and csr_array.

``python bench/run/everyday.py --help`` says what can be asked for.
"""

from bsrgemm._benchmark.measure.everyday import main

if __name__ == "__main__":
    main()
