"""Analysis of a recorded stream: measurements from its spans, the account of its time, and advice."""
