"""Pipelines of models in evaluation mode, the public streaming interface."""
