"""Make a model smaller: prune it, and train it on so that it loses little."""
