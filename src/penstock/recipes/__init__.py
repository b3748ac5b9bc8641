"""Whole training runs: a model and data by name, one loop, what it leaves behind, and runs compared."""
