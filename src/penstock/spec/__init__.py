"""What is measured, what there is, and what is to be done, as values that can be saved and loaded. No torch here."""
