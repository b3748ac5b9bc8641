"""Tensors of a model from files and modules, one at a time."""
