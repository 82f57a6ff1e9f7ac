"""The losses, one per file: formula, function and module."""
