"""Train a sparse retriever on your own Python's documentation and search it: ``make demo``."""
