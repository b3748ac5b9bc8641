"""Execution of schedules on a process's stages over channels, with counters and traces."""
