"""Work that is spread over several processes, and the libraries of others that spread it.

Nothing here is imported by ``import bsrgemm``, and no other library is imported until one of its objects is passed.
"""
