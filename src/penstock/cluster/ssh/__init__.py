"""Machines reached by ssh: checking, preparing, starting and ending runs."""
