"""Training that survives losses: recovery from lost processes, and admission of new ones."""
