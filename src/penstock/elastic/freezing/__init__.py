"""Policies for the number of frozen leading layers after each epoch: pure functions of the epochs' records."""
