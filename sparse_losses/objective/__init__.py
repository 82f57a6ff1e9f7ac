"""A training run with many losses: objective, terms, schedules, diagnostics."""
