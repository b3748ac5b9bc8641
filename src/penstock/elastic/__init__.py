"""Freeze layers that have converged, and give what that frees to more replicas."""
