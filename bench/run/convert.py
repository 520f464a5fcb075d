"""Changing format on the GPU, beside the way through the host: copy down, SciPy, copy back (cupy issue 7177).

``python bench/run/convert.py --help`` lists the options.
"""

from bsrgemm._benchmark.measure.convert import main

if __name__ == "__main__":
    main()
