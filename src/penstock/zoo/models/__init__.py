"""Names of models to modules: timm, transformers, functions of the user's own."""
