"""Policies that decide after each epoch how many leading layers are frozen: pure functions of what the epochs were."""
