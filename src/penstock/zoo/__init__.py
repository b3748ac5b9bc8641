"""Names of models and data to objects: timm, transformers, functions, checkpoints, images."""
