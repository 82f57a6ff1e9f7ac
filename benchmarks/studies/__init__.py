"""Studies of several trainings of the demo's model; the documentation has a page for each."""
