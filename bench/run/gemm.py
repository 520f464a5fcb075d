"""C = A B for a block-sparse A on an NVIDIA GPU: how fast and how exact, beside dense cuBLAS and other peers.

``python bench/run/gemm.py --help`` lists the options.
"""

from bsrgemm._benchmark.measure.gemm import main

if __name__ == "__main__":
    main()
