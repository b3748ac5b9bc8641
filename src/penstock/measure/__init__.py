"""Measure: what parts of a model cost on this device."""
