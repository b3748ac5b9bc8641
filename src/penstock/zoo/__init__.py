"""Load models and data by name: timm, transformers, functions, checkpoints, images."""
