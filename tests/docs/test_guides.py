"""The guides' scripts are the examples and do what the guides say; their commands run, on a small model."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from penstock.cli import main as main_module
from penstock.elastic.options import ElasticChoices
from penstock.measure import hosts, profiler
from penstock.measure.costs import MessageCosts
from penstock.recipes import launch, several
from penstock.recipes.launch import fit
from penstock.recipes.metrics import FitResult
from penstock.recipes.settings import FitSettings
from penstock.recipes.several import Row
from penstock.spec.cluster import Cluster, Device, write_cluster
from tests.cli.conftest import SMALL
from tests.processes import PROGRAMS, ROOT, run_groups

Run = Callable[..., tuple[int, str, str]]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
EXAMPLES = {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
# how many processes each example is started in below; 0 is one without torchrun
STARTED = {
    "bert_sentences.py": (0, 2), "elastic_digits.py": (0, 2), "gpt2_pipe.py": (0,), "tokens_pipeline.py": (0, 2, 3),
    "tokens_torch.py": (2,),
}  # fmt: skip
# on machines of their own, with a real sshd or as root: by tests/cluster
ELSEWHERE = r"^scp |penstock hosts (check|push|measure|run) |--cluster |scripts/run\.sh "


def blocks(language: str, guide: Path) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", guide.read_text(), re.DOTALL)


def commands(guide: Path) -> list[str]:
    text = "".join(blocks("console", guide)).replace("\\\n", " ")
    lines = [line[2:].partition("  #")[0].strip() for line in text.splitlines() if line.startswith("$ ")]
    # a command on a board is that command here
    return [re.sub(r'^ssh \S+ ".* -m (penstock .*)"$', r"\1", line) for line in lines]


def test_scripts_in_guides_are_the_examples_or_run_as_they_are() -> None:
    shown = [block for guide in GUIDES for block in blocks("python", guide)]
    known = [block for block in shown if any(block in text for text in EXAMPLES.values())]
    assert len(known) == 5
    for block in shown:
        if block not in known:
            exec(block, {})


def test_every_start_of_an_example_has_a_test() -> None:
    for guide in GUIDES:
        for command in commands(guide):
            if (
                found := re.fullmatch(r"(?:python|torchrun --nproc-per-node (\d)) examples/(\S+)", command)
            ) is not None:
                assert int(found[1] or 0) in STARTED[found[2]], command


def test_examples_learn_alike_in_any_number_of_processes(tmp_path: Path) -> None:
    groups, folders = [], []
    for name, sizes in STARTED.items():
        for size in sizes:
            folders.append((name, size, tmp_path / f"{name}-{size}"))
            folders[-1][2].mkdir()
            groups.append((size, [str(folders[-1][2]), str(ROOT / "examples" / name)]))
    for ended in run_groups(PROGRAMS / "script_in_folder.py", groups, 200.0):
        assert [end.status for end in ended] == [0] * len(ended)
    printed: dict[str, list[list[float]]] = {name: [] for name in STARTED}
    for name, _, folder in folders:
        for file in sorted(folder.glob("rank*.txt")):
            if losses := [float(found) for found in re.findall(r"loss (\d+\.\d{4})", file.read_text())]:
                printed[name].append(losses)
    # on every process where this library trains, and on the last one where torch does
    assert {name: len(lines) for name, lines in printed.items()} == {
        "bert_sentences.py": 3, "elastic_digits.py": 3, "gpt2_pipe.py": 1, "tokens_pipeline.py": 6,
        "tokens_torch.py": 1,
    }  # fmt: skip
    for lines in printed.values():
        assert lines[0][-1] < lines[0][0]
        assert all(line == pytest.approx(lines[0], abs=2e-4) for line in lines)
    assert printed["tokens_torch.py"][0] == pytest.approx(printed["tokens_pipeline.py"][0], abs=2e-4)
    assert printed["bert_sentences.py"][0][-1] < 0.2
    from transformers import BertForSequenceClassification

    for folder in (folder for name, _, folder in folders if name == "bert_sentences.py"):
        _, said = BertForSequenceClassification.from_pretrained(folder / "sentences", output_loading_info=True)
        assert not said["missing_keys"]
        assert not said["unexpected_keys"]


def small(command: str) -> list[str]:
    """Give a command a model that takes milliseconds, and few rows and stages."""
    command = re.sub(r"timm:deit_\w+", SMALL, command)
    command = command.replace("--stages 1,2,4 --num-images 100", "--stages 1 --num-images 4")
    command = command.replace("--stages 4", "--stages 2").replace("n_layer=12,n_embd=96", "n_layer=2,n_embd=16")
    if command.startswith("penstock train"):
        command += " --steps 2 --batch-size 8 --set num_rows=40"
        command += " --set length=16" if ".txt" in command else ""
    return shlex.split(command)[1:]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_commands_of_guides_succeed(
    guide: Path, penstock: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but those of several trainings or replicas of stages, whose settings are looked at: other tests have them."""
    photos = tmp_path / "photos"
    photos.mkdir()
    for index in range(4):
        Image.new("RGB", (40, 30), (60 * index, 100, 50)).save(photos / f"{index}.png")
    (tmp_path / "text.txt").write_text("\n".join(f"the quick brown fox jumps over {n} lazy dogs" for n in range(200)))
    devices = (Device(name=name, speed=1.0, memory_bytes=24 * 2**30) for name in ("board0", "board1"))
    (tmp_path / "measured.toml").write_text(write_cluster(Cluster(devices=tuple(devices))))  # as `hosts measure` does
    compared: list[str] = []

    def run_nothing(runs: list[tuple[str, FitSettings]], _lab: Any, _tell: Any) -> list[Row]:
        compared.extend(name for name, _ in runs)
        return [Row(name=name, settings=asked, failed="", out_of_memory=True) for name, asked in runs]

    def run_in_two_processes(asked: FitSettings, cluster: Path | None) -> FitResult:
        first = asked.freeze in {ElasticChoices().freeze, "schedule:1/3"}  # of elastic ones
        if asked.replicas is None and first:
            return fit(asked, cluster)
        both.append(asked)
        return FitResult(settings=asked, num_processes=asked.num_processes, epochs=[], new_tensors=[])

    both: list[FitSettings] = []
    monkeypatch.setattr(several, "run_all", run_nothing)
    monkeypatch.setattr(launch, "fit", run_in_two_processes)
    # what takes seconds and is tested where it is
    monkeypatch.setattr(hosts, "measure_messages", MessageCosts)
    monkeypatch.setattr(profiler, "worker_bytes", lambda: 1e8)
    for command in commands(guide):
        if not command.startswith("penstock ") or re.search(ELSEWHERE, command + " "):
            assert re.search(rf"^(python|torchrun) |{ELSEWHERE}", command + " "), command
            continue
        status, _, err = penstock(*small(command))
        assert status == 0, (command, err)
    if guide.stem == "gpt2":
        assert compared == ["single", "model", "pipeline", "data", "both"]
        written = [json.loads(line) for line in (tmp_path / "runs/gpt2/metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in written if line["kind"] == "step"] == [1, 2]
        assert [(asked.stages, asked.replicas) for asked in both] == [(2, 2)]


def test_commands_of_guides_have_known_verbs_and_options(penstock: Run) -> None:
    for guide in GUIDES:
        for command in commands(guide):
            if command.startswith("penstock ") and re.search(ELSEWHERE, command + " "):
                verb = command.split()[1:3] if command.split()[1] == "hosts" else command.split()[1:2]
                assert verb[0] in main_module._HELP
                help_text = penstock(*verb, "--help")[1]
                for option in re.findall(r"--[a-z-]+", command.partition(" -- ")[0]):
                    assert option in help_text, command
