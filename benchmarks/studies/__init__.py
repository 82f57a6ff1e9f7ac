"""Studies: several trainings of the demo's model, or what a loss costs as one size grows."""
