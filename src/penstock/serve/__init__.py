"""An HTTP server for a pipeline: OpenAI's protocol for language models, classification for image models."""
