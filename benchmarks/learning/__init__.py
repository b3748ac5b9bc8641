"""Learning in stages and replicas beside learning in one process: accuracy and validation loss."""
