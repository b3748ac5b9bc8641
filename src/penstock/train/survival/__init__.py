"""Training that survives lost processes: recovery, and admission of new processes."""
