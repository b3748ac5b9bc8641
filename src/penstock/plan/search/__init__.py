"""Search for the cuts and devices of a plan with the least predicted time."""
