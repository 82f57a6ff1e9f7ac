"""Reports of results: the tables of the documentation."""
