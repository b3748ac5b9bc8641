"""Elastic training: recovery from lost processes, and admission of new ones."""
