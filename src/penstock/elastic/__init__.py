"""Elastic training: freezes converged layers and uses the freed devices for more replicas."""
