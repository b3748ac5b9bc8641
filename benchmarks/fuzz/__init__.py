"""Whether every reader refuses what is damaged or forged, in one line."""
