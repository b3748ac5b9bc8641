"""Runtimes that compute one stage: eager, with gradients, with a split backward; they know no other process."""
