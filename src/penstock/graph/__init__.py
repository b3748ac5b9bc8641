"""Models as lists of operations: capture, cuts, division into stage programs, calls."""
