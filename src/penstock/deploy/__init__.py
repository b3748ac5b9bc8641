"""Deployment of stages onto ranks: cuts, programs and weights, workers, streams."""
