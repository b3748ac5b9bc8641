"""Recording of a run's timeline; knows neither stages nor the network."""
