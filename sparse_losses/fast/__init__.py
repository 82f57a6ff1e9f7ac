"""Faster computations of the losses; a module is named after the stem of its loss."""
