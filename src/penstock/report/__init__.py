"""Reports of recorded runs: a merged trace, the account of lost time, tables, a page."""
