"""Measuring bsrgemm beside its peers: ``python -m bsrgemm bench``, and what the scripts in bench/ share.

`timing` and `machine` know clocks and versions, `place` the CPU and the GPU with their roofs. `products` and
`attentions` are the problems (`problem` says what one is), on `patterns` and `random_data`; `product_peers` and
`attention_peers` are what others have for them, `attention_check` tells right from wrong. `suite` measures, `cells`
puts a row into words, `screen` shows it, `results` keeps and compares, `figures` draws, `page` writes one page of it
all; `ncu` reads a profile. Nothing here is imported by ``import bsrgemm``.
"""
