"""Profiles, clusters and plans as values that can be saved and loaded, without torch."""
