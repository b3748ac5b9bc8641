"""Which action follows which on every device: schedules as data, checked, drawn and simulated."""
