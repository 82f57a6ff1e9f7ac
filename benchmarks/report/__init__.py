"""Reports of results: merged runs, the aims and the tables of the documentation."""
