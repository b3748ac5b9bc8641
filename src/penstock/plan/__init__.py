"""Decide: which units form a stage, and in which order a stage works. No torch in this room."""
