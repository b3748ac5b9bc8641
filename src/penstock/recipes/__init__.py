"""Complete applications: training, comparison of runs, classification of images, text generation."""
