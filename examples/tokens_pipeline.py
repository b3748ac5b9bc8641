import torch
import torch.nn.functional as F
from torch import nn

import penstock


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(4))
        self.head = nn.Linear(64, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def token_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


torch.manual_seed(0)
tokens = torch.randint(1000, (96, 17))
model = Tokens()

pipe = penstock.Pipeline(model, tokens[:8, :-1], microbatches=4, schedule="gpipe")
optimizer = pipe.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
for epoch in range(3):
    for batch in pipe.loader(tokens, batch_size=32):
        loss = pipe.train_step(batch[:, :-1], batch[:, 1:], token_loss)
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: loss {loss:.4f}")
