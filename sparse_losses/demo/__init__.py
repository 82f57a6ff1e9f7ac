"""Search your own Python's documentation with a sparse retriever that you trained yourself.

Run it with ``python -m sparse_losses.demo``. Nothing here is imported by ``import sparse_losses``.
"""
