import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

import penstock

torch.manual_seed(0)
config = BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, num_labels=2
)
model = BertForSequenceClassification(config).train()


class Sentences(Dataset):
    """Sixteen words each; those that begin with the seventh word of the vocabulary are of class 1."""

    def __init__(self) -> None:
        self.tokens = torch.randint(10, 100, (256, 16))
        self.tokens[::2, 0] = 7

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": (tokens[0] == 7).long()}


example = {name: values[None].repeat(8, *[1] * values.dim()) for name, values in Sentences()[0].items()}
pipe = penstock.Pipeline(model, (), example, microbatches=4)
optimizer = pipe.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=3e-3))
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=24)
for epoch in range(3):
    for batch in pipe.loader(Sentences(), batch_size=32, shuffle=True):
        loss = pipe.train_step(batch)  # the model's own loss, from its labels
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: loss {loss:.4f}")
config.save_pretrained("sentences")
pipe.save("sentences/model.safetensors")
