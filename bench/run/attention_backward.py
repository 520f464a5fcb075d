"""The gradients of attention: how fast and how exact, beside their peers.

``python bench/run/attention_backward.py --help`` lists the options.
"""

from bsrgemm._benchmark.measure.attention_backward import main

if __name__ == "__main__":
    main()
