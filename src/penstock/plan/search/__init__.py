"""Find the cuts and devices of a plan whose predicted time is least."""
