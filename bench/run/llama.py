"""A model of the shape of Llama 3.1 8B, end to end: prefill with `attention`, then token by token with `KVCache`.

``python bench/run/llama.py --help`` says what can be asked for.
"""

from bsrgemm._benchmark.measure.llama import main

if __name__ == "__main__":
    main()
