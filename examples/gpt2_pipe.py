import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import penstock


class Embed(nn.Module):
    """Tokens and their places."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = model.transformer.wte, model.transformer.wpe, model.transformer.drop

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device)))


torch.manual_seed(0)
config = GPT2Config(vocab_size=500, n_embd=64, n_layer=12, n_head=4, bos_token_id=0, eos_token_id=0)
gpt2 = GPT2LMHeadModel(config)
head = nn.Linear(64, 500, bias=False)
head.weight = nn.Parameter(gpt2.lm_head.weight.detach().clone())  # on a device of its own it cannot share the embedding
layers = nn.Sequential(Embed(gpt2), *gpt2.transformer.h, gpt2.transformer.ln_f, head)

# with GPUs: the first half of the layers on the first, the other half on the second
if torch.cuda.device_count() > 1:
    for index, layer in enumerate(layers):
        layer.to("cuda:0" if index < len(layers) // 2 else "cuda:1")
pipe = penstock.Pipe(layers, split_size=4)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
tokens = torch.randint(500, (16, 33))
for step in range(5):
    output = pipe(tokens[:, :-1])
    loss = F.cross_entropy(output.flatten(0, 1), tokens[:, 1:].flatten().to(output.device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
