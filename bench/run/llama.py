"""A model of the shape of Llama 3.1 8B, end to end: prefill with `attention`, then token by token with `KVCache`.

``python bench/run/llama.py --help`` lists the options.
"""

from bsrgemm._benchmark.measure.llama import main

if __name__ == "__main__":
    main()
