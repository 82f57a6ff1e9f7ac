"""The benchmark suite: the package against plain formulas, torch.compile and other packages.

Imports go one way only: ``schema <- losses/<stem> <- run <- report <- studies <- __main__``.
"""
