"""Reports of results: merged runs, the aims, the tables of the documentation, plots."""
