"""The benchmark suite: the package against the plain formulas, a compiler and its peers."""
