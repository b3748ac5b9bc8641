"""A recorded training: what its spans say, where its time went, what would be faster."""
