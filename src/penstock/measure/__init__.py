"""Measurement of the costs of a model's parts on this device."""
