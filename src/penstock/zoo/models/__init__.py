"""Load models by name: timm, transformers, the user's own functions."""
