"""Linear elasticity by CG with a V-cycle (pyamg issue 260): pyamg builds the hierarchy on the host, bsrgemm solves.

``python bench/run/elasticity.py --help`` lists the options.
"""

from bsrgemm._benchmark.solver.elasticity import main

if __name__ == "__main__":
    main()
