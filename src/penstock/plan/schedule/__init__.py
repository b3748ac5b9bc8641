"""Schedules: the order of actions on every device, as data that is checked, drawn and simulated."""
