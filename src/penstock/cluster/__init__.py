"""Clusters: an emulated cluster on one machine, and machines reached by ssh."""
