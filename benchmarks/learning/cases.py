"""What is trained: two small models, each in one process and as a pipeline, with the same global batch."""

from dataclasses import dataclass
from pathlib import Path

from penstock.recipes.settings import FitSettings

VIT = "timm:vit_tiny_patch16_224,img_size=32,patch_size=4,depth=4,embed_dim=64,num_heads=4"
GPT2 = (
    "hf:gpt2,vocab_size=512,n_embd=96,n_layer=2,n_head=4,n_positions=64,bos_token_id=0,eos_token_id=0,"
    "resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0"
)
SEEDS = (0, 1, 2)
ALONE, PIPELINE = "one process", "pipeline"


@dataclass(frozen=True, slots=True)
class Case:
    """One run: what is learned, in how many processes, from which seed."""

    subject: str
    way: str
    settings: FitSettings

    @property
    def name(self) -> str:
        """Name it in tables and figures."""
        return f"{self.subject}, {self.way}, seed {self.settings.seed}"


def image_cases(data: Path, validation: Path, folder: Path) -> list[Case]:
    """Give a ViT in one process with each seed, and with the first seed in two stages and two replicas."""
    base = FitSettings(
        model=VIT, data=str(data), validation=str(validation), num_rows=1500, batch_size=50, epochs=5, threads=1,
        save=False,
    )  # fmt: skip
    alone = [
        Case("ViT", ALONE, base.replace(seed=seed, output=str(folder / f"vit-alone-{seed}"), stages=1))
        for seed in SEEDS
    ]
    together = base.replace(
        seed=SEEDS[0], stages=2, replicas=2, microbatches=2, output=str(folder / f"vit-pipeline-{SEEDS[0]}")
    )
    return [*alone, Case("ViT", PIPELINE, together)]


def text_cases(text: Path, folder: Path) -> list[Case]:
    """Give a GPT-2 in one process and in two stages."""
    base = FitSettings(
        model=GPT2, data=str(text), length=64, num_rows=800, batch_size=32, epochs=5, threads=1, save=False
    )
    return [
        Case("GPT-2", ALONE, base.replace(stages=1, output=str(folder / "gpt2-alone"))),
        Case("GPT-2", PIPELINE, base.replace(stages=2, microbatches=4, output=str(folder / "gpt2-pipeline"))),
    ]
