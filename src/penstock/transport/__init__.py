"""Bytes and tensors between two ranks. Nothing here knows of stages."""
