"""A model as a list of operations: captured, cut, divided into stage programs, called."""
