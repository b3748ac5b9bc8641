import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline


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

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
pipe = pipeline(model, mb_args=(tokens[:8, :-1],), split_spec={"layers.2": SplitPoint.BEGINNING})
stage = pipe.build_stage(rank, torch.device("cpu"), dist.group.WORLD)
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=token_loss)
optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
for epoch in range(3):
    for batch in tokens.split(32):
        if rank == 0:
            schedule.step(batch[:, :-1].contiguous())
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=batch[:, 1:], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
    if rank == size - 1:
        print(f"epoch {epoch}: loss {torch.stack(losses).mean():.4f}")
dist.destroy_process_group()
