"""Costs of a plan in seconds, bytes and link time, from a profile and a cluster."""
