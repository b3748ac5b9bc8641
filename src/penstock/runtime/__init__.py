"""Compute one stage: eagerly, with gradients, with its backward split. Nothing here knows of other processes."""
