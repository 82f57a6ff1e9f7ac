"""Measurement of a case: checks, memory, interleaved times, ceilings, worker processes."""
