"""Attention over two ranks of MPI beside one: equality, bytes, and a cost model beside the times.

``python bench/run/ring.py --help`` says what can be asked for.
"""

from bsrgemm._benchmark.measure.ring import main

if __name__ == "__main__":
    main()
