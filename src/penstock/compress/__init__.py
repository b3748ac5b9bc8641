"""Compression of a model: pruning, followed by fine-tuning to recover accuracy."""
