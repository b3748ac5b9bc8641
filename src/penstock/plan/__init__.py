"""Planning: which units form a stage, on which device, and the order of a stage's work. Does not import torch."""
