"""Measure a model: pipelines compared with one process and with a peer, on the same devices."""
