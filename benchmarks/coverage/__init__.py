"""How many architectures split by themselves and give the same bits as the model."""
