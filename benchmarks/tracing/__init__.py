"""Whether the account names what was done to a run, and what tracing costs."""
