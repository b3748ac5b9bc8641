"""Machines that are reached by ssh: look at them, bring them what a run needs, start it there and end it."""
