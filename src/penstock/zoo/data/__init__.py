"""Load data by name: images, text, labelled sentences."""
