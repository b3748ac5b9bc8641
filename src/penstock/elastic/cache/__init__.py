"""On-disk cache of frozen layers' outputs for each sample, so that later epochs need not compute them."""
