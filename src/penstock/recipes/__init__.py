"""Whole applications: train, compare runs, classify a folder of images."""
