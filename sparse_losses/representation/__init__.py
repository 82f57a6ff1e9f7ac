"""Modules and functions that turn hidden states into sparse vectors."""
