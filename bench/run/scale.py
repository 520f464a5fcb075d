"""Matrices over several ranks of MPI beside one: products, messages, conjugate gradients, and a cost model.

``python bench/run/scale.py --help`` says what can be asked for.
"""

from bsrgemm._benchmark.measure.scale import main

if __name__ == "__main__":
    main()
