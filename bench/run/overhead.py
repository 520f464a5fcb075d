"""What a call costs beside its kernel: host time of a launch, cold compile, warm start in a new process, work lists.

``python bench/run/overhead.py --help`` lists the options.
"""

from bsrgemm._benchmark.measure.overhead import main

if __name__ == "__main__":
    main()
