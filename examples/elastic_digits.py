import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from timm.models.vision_transformer import VisionTransformer
from torch.utils.data import TensorDataset

import penstock

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
dataset = TensorDataset(images, torch.tensor(digits.target))
model = VisionTransformer(
    img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=24, depth=4, num_heads=3
).train()

pipe = penstock.Pipeline(model, images[:8], microbatches=4)
optimizer = pipe.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=3e-3))
loader = pipe.loader(dataset, batch_size=64, shuffle=True)
elastic = pipe.elastic(loader, freeze="schedule:1/3", epochs=4)
for epoch in range(4):
    for x, y in loader:
        loss = pipe.train_step(x, y, F.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: loss {loss:.4f}, {elastic.frozen_layers} layers frozen")
