"""Which processes take part: started, joined, watched, dismissed."""
