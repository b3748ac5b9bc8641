"""A model in evaluation mode as a pipeline: what users feed and take results from."""
