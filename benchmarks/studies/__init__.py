"""Studies of several trainings of the demo's model, each with a page of the documentation."""
