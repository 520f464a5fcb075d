"""Measuring bsrgemm beside its peers: ``python -m bsrgemm bench``, and what the scripts in bench/ share.

`timing` and `machine` know clocks and versions, `products` and `attentions` the problems, `product_peers` and
`attention_peers` what others have for them; `suite` measures, `screen` shows, `results` keeps and compares,
`figures` draws and `page` writes one page of it all. Nothing here is imported by ``import bsrgemm``.
"""
