"""Search for the cuts and devices with the least predicted time."""
