"""Schedules: the order of actions on every device as data, checked, drawn and simulated."""
