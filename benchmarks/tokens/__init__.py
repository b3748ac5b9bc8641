"""Tokens per second of one core by the precision of the weights, what it costs in quality, and llama.cpp beside it."""
