"""Names of data to samples: images, text, labelled sentences."""
