"""Reports of recorded runs: one trace, the account of lost time, tables, pictures, a page."""
