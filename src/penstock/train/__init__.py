"""Pipelines of models in training mode: steps, data and checkpoints, without ranks in the user's loop."""
