"""Which processes take part: started, joined, watched, dismissed, and called together again."""
