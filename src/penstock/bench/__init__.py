"""Measure a model: pipelines against one process and against a peer, on the same devices."""
