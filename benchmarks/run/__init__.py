"""How a case is measured: checks, memory, interleaved times, ceilings, worker processes."""
