"""Text from a decoder: a cache on every stage, lanes of sequences, sampling."""
