"""The runtime `compiled` beside eager: parity and speed on the CPU."""
