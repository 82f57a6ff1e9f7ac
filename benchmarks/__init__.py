"""The benchmark suite: the package against the plain formulas, a compiler and its peers.

``schema <- losses/<stem> <- run <- report <- studies <- __main__``: imports run only this way.
"""
