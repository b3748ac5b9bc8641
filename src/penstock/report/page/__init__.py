"""Figures, tables and the page that holds them."""
