"""Runtimes of one stage: eager, with gradients, with a split backward. They are independent of other processes."""
