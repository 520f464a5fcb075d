"""Measuring bsrgemm beside its peers: ``python -m bsrgemm bench``, and what the scripts in bench/run start.

From the bottom up: `timing` has the clocks, `machine` and `provenance` say what was measured where (versions, commit,
digests of the kernels launched), `results` and `table` keep it. `patterns` and `random_data` make operands, `peers` are
other libraries, `checks` tell right from wrong, `cases` are the problems. `measure` and `solver` hold what is measured,
section by section, on what `runner` offers them; `show` makes text, tables, pictures and pages of the rows. `internals`
is all that is needed from inside the package beyond its public names. Nothing here is imported by ``import bsrgemm``.
"""
