"""Analysis of a recorded training run: measurements from its spans, the account of its time, and advice."""
