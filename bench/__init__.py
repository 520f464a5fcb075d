"""The benchmark of bsrgemm, run from a checkout: ``python -m bench --quick``. No wheel carries it.

A study is a table: its cases, the peers beside them, and its columns. `cases` say what is computed, once; `peers` are
other libraries; `checks` tell right from wrong; `place` is the machine with its clocks. `measure` makes rows of cases,
`studies` lists all tables, and `report` writes them. `internals` is all that is needed from inside bsrgemm.
"""
