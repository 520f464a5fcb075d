"""Masked attention, softmax(scale q k^T) v: how fast and how exact, beside its peers.

``python bench/run/attention.py --help`` lists the options.
"""

from bsrgemm._benchmark.measure.attention import main

if __name__ == "__main__":
    main()
