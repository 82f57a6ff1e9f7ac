"""Reports of results: the aims and the tables of the documentation."""
