"""Linear systems by `bsrgemm.linalg` beside pyamg: set-up, new numbers, solution and iterations.

``python bench/run/solvers.py --help`` says what can be asked for.
"""

from bsrgemm._benchmark.solver.systems import main

if __name__ == "__main__":
    main()
