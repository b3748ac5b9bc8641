"""Decide: which units form a stage, on which device, and in which order a stage works. No torch in this room."""
