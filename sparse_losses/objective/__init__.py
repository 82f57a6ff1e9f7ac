"""A training run with many losses: objective, schedules, sparsity control, diagnostics."""
