"""Train a sparse retriever on your own Python's documentation and search it.

Run it with ``python -m sparse_losses.demo``. ``import sparse_losses`` does not import it.
"""
