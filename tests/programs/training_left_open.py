"""Trains for a step, and leaves the pipeline open."""

import torch

import penstock

x = torch.ones(2, 4)
pipe = penstock.Pipeline(torch.nn.Linear(4, 4), x)
pipe.train_step(x, x, torch.nn.functional.mse_loss)
