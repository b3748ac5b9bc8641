"""A model in training mode as a pipeline: steps, data, checkpoints, with no rank in the user's loop."""
