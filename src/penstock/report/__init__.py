"""What a run left, made readable: one trace, the account of lost time, tables, pictures, a page."""
