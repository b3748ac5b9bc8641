"""Figures, tables and the page that contains them."""
