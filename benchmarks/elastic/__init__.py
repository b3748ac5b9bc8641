"""Elastic training on emulated hosts: how much faster the same epochs are, and what that costs."""
