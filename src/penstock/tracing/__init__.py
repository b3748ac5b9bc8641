"""Recording of a run's timeline, independent of the stages' work and of the network."""
