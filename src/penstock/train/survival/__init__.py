"""A training that goes on without processes that were lost, and with others that come."""
