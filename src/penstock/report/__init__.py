"""Reports of recorded runs: a merged trace, the account of lost time, tables, pictures, a page."""
