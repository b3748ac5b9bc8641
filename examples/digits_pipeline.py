import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
dataset = TensorDataset(images, torch.tensor(digits.target))
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 32, 3, stride=2), nn.GELU(),
    nn.Flatten(), nn.Linear(288, 64), nn.GELU(), nn.Linear(64, 10),
)  # fmt: skip

pipe = penstock.Pipeline(model, images[:8], microbatches=4)
optimizer = pipe.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
for epoch in range(3):
    for x, y in pipe.loader(DataLoader(dataset, batch_size=64, shuffle=True)):
        loss = pipe.train_step(x, y, F.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: loss {loss:.4f}")
pipe.save("digits.safetensors")
