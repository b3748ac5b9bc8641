"""A recorded training: measurements from its spans, the account of its time, and advice."""
