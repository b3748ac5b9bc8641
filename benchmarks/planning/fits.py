"""What `penstock fits` counts against what processes hold: inference, answers and training, each in two processes.

Everything is counted in a process of its own, before a run, from the model's name alone; weights are random.
"""

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.planning.memory import BATCH, measure_training, write_text
from penstock.plan.candidates import PlanRequest
from penstock.plan.choose import choose
from penstock.plan.needs import stage_needs
from penstock.recipes.settings import FitSettings
from penstock.resources import anonymous_bytes
from penstock.spec.cluster import Cluster, Device
from penstock.spec.plan import write_plan
from penstock.spec.profile import Profile, read_profile
from penstock.zoo.models.language import load_tokenizer
from tests.generate.tokens import save_model

NAME = "fits"
_NEW = 16
IMAGES = (
    "vit_tiny_patch16_224", "vit_small_patch16_224", "deit_tiny_patch16_224", "deit_base_patch16_224", "resnet18",
    "resnet50", "convnext_tiny", "mobilenetv3_small_100", "efficientnet_b0", "swin_tiny_patch4_window7_224",
    "mixer_s32_224", "regnety_004", "densenet121", "vgg11", "beit_base_patch16_224", "cait_xxs24_224",
    "poolformer_s12", "resmlp_12_224", "xcit_nano_12_p16_224", "levit_128s",
)  # fmt: skip
_VIT = "timm:vit_tiny_patch16_224,img_size=64,patch_size=8,num_classes=10,depth="
_GPT2 = "hf:gpt2,n_embd=384,n_head=6,vocab_size=4096,n_positions=128,n_layer="
TRAININGS = tuple(
    (f"{model}{depth}", schedule)
    for schedule, shallow, deep in (("1f1b", 4, 12), ("gpipe", 6, 8))
    for model, depth in ((_VIT, shallow), (_VIT, deep), (_GPT2, 2), (_GPT2, 4), (_GPT2, 6))
)
# hidden size, layers, slots, tokens of a sequence
DECODERS: tuple[tuple[int, int, int, int], ...] = (
    (256, 4, 1, 256), (256, 8, 4, 512), (512, 4, 1, 512), (512, 8, 8, 512), (512, 12, 2, 1024),
    (768, 6, 1, 256), (768, 12, 4, 512), (1024, 6, 2, 512), (1024, 8, 1, 2048), (1024, 12, 4, 256),
)  # fmt: skip
_NAMES = (socket.gethostname(), f"{socket.gethostname()}:1")  # as under torchrun
_TWO = Cluster(devices=tuple(Device(name=name, speed=1.0, memory_bytes=2**36) for name in _NAMES))
_COUNT = """
import sys
from penstock.resources import share_arena
share_arena()  # as the command does, which has also imported this
import penstock.cli.fits, penstock.cli.main
from penstock.recipes.profiled import count_inference, count_training
from penstock.recipes.settings import FitSettings
from penstock.spec.profile import write_profile
file, model, data, length = sys.argv[1:]
found = count_training(FitSettings(model=model, data=data)) if data else count_inference(model, max_length=int(length))
write_profile(file, found)
"""


def fits_rows(only: str | None = None, *, quick: bool = False) -> list[dict[str, Any]]:
    """Count and run every model; a row for each."""
    if only is not None and NAME not in only.split(","):
        return []
    some = slice(None, None, 5 if quick else None)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        (folder / "images").mkdir()
        for number in range(24):
            Image.effect_noise((256, 256), number).convert("RGB").save(folder / f"images/{number}.jpg")
        pictures = ["infer", "--images", str(folder / "images"), "--output", str(folder / "predictions.csv")]
        rows = [_stream(f"timm:{model}", folder, pictures) for model in IMAGES[some]]
        for hidden, layers, slots, length in DECODERS[some]:
            sizes: dict[str, Any] = {
                "num_hidden_layers": layers,
                "num_attention_heads": hidden // 64,
                "max_position_embeddings": 2048,
            }
            save_model(folder, hidden_size=hidden, intermediate_size=3 * hidden, **sizes)
            # caches take memory where they are written, so prompts are nearly as long as the caches
            words = len(load_tokenizer(f"hf:{folder}")("Pipe ")["input_ids"])
            text = "Pipe " * ((length - _NEW - 8) // words)
            prompts = [word for number in range(3 * slots) for word in ("--prompt", f"{number} {text}")]
            command = ["generate", *prompts, "--max-new-tokens", str(_NEW)]
            rows.append(_stream(f"hf:{folder}", folder, command, slots, length))
        text = write_text(folder / "text.txt")
        for model, schedule in TRAININGS[some]:
            settings = FitSettings(
                model=model, data="digits" if "vit" in model else text, batch_size=BATCH,
                steps=4, epochs=1, threads=1, validate=False, save=False, output=str(folder / "run"),
            )  # fmt: skip
            rows.append(measure_training(settings, _counted(folder, model, settings.data), (2,), schedule))
    return [row | {"case": NAME} for row in rows]


def _counted(folder: Path, model: str, data: str = "", length: int = 1) -> Profile:
    command = [sys.executable, "-c", _COUNT, str(folder / "profile.json"), model, data, str(length)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return read_profile(folder / "profile.json")


def _stream(model: str, folder: Path, command: list[str], rows: int = 1, length: int = 1) -> dict[str, Any]:
    profile = _counted(folder, model, length=length)
    choice = choose(profile, _TWO, PlanRequest(rows=(rows,), replicas=False, alternate=False))
    write_plan(folder / "plan.json", choice.plan)
    verb, *options = command
    # without torchrun, the first process would hold no stage, beside the plan's two
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
           "-m", "penstock", verb, model, *options, "--plan", str(folder / "plan.json")]  # fmt: skip
    peaks: dict[str, int] = {}
    with subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            for device, pid in _devices(process.pid):
                peaks[device] = max(peaks.get(device, 0), anonymous_bytes(pid) or 0)
            time.sleep(0.01)
        said = process.stderr.read() if process.stderr else ""
    if process.returncode:
        sys.exit(f"{model}: {said}")
    predicted = {needs.device: needs.total for needs in stage_needs(choice, profile)}
    measured = {device: peaks[device] for device in predicted}
    row = {"name": model, "predicted": predicted, "measured": measured}
    print(model, {name: round(predicted[name] / peak - 1, 3) for name, peak in measured.items()}, file=sys.stderr)
    return row


def _devices(parent: int) -> Iterator[tuple[str, int]]:
    """Yield the devices of a run and their processes, the ranks under torchrun."""
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with contextlib.suppress(OSError):
            given = Path(f"/proc/{pid}/environ").read_text()
            yield from ((name, int(pid)) for rank, name in enumerate(_NAMES) if f"\0RANK={rank}\0" in given)
