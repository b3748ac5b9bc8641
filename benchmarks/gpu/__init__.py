"""Speed on one GPU: decoding, training, and the cost of a cut, compared with plain torch and transformers."""
