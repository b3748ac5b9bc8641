"""No output of any command is an input, or another output; and outputs that cannot be written are found first."""

import functools
import importlib
import inspect
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from penstock.cli.main import _HELP, _WITH
from penstock.cli.options import Written, _declared, with_paths
from penstock.errors import UsageError
from penstock.spec.cluster import write_cluster
from penstock.spec.profile import write_profile
from tests.cli.conftest import SMALL
from tests.fewer import examples, first
from tests.generate.tokens import save_model
from tests.spec.samples import make_cluster, make_profile

Run = Callable[..., tuple[int, str, str]]
# texts of verbs that may be paths
TEXTS = {"model", "data", "images", "validation", "test", "class_order", "schedule"}


def _verbs() -> Iterator[tuple[str, Callable[..., None]]]:
    for name in _HELP:
        module = importlib.import_module(f"penstock.cli.{_WITH.get(name, name)}")
        if hasattr(module, "app") and name not in _WITH:
            yield from (
                (f"{name} {each.name or each.callback.__name__}", each.callback)
                for each in module.app.registered_commands
            )
        else:
            yield name, getattr(module, name)


def _paths(verb: Callable[..., None]) -> tuple[list[str], dict[str, Written]]:
    """The parameters of a verb that are read, and those that are written."""
    verb = inspect.unwrap(verb, stop=lambda each: hasattr(each, "__signature__"))
    read, written = [], {}
    for each in inspect.signature(verb).parameters.values():
        _, how = _declared(each.annotation)
        if how is not None:
            written[each.name] = how
        elif "Path" in str(each.annotation) or (each.name in TEXTS and "str" in str(each.annotation)):
            read.append(each.name)
    return read, written


def _spy(verb: Callable[..., None], calls: list[dict[str, Any]]) -> Callable[..., None]:
    signature = inspect.signature(verb)

    @functools.wraps(verb)
    def spy(**options: Any) -> None:
        calls.append(options)

    spy.__dict__.pop("checks_paths", None)
    spy.__signature__ = signature  # type: ignore[attr-defined]
    return with_paths(spy)


VERBS = dict(_verbs())
WRITE = {name for name, verb in VERBS.items() if _paths(verb)[1]}


def test_every_verb_that_writes_is_in_the_table() -> None:
    nothing = {"chat", "serve", "worker", "hosts push", "hosts run", "hosts join"}
    assert {*VERBS} - WRITE == nothing


@pytest.mark.parametrize("verb", sorted(WRITE))
def test_output_cannot_be_an_input(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[dict[str, Any]] = []
    call, (read, written) = _spy(VERBS[verb], calls), _paths(VERBS[verb])
    source, folder = tmp_path / "in" / "file.json", tmp_path / "in"
    folder.mkdir()
    source.write_text("input")
    (tmp_path / "link.json").symlink_to(source)
    os.link(source, tmp_path / "hard.json")
    (tmp_path / "other").symlink_to(folder)
    files = [source, Path("in/file.json"), Path("link.json"), Path("hard.json"), Path("other/file.json")]
    folders = [folder, Path("other"), Path("in"), Path(), tmp_path]
    for each, (output, how) in itertools.product(read, written.items()):
        kept: Any = f"hf:{source}" if each == "model" else str(source) if each in TEXTS else source
        for name in (folders if how.is_folder else files) if how.is_compared else ():
            for value in (kept, [kept]):
                with pytest.raises(UsageError, match=r"choose another"):
                    call(**{each: value, output: name})
        assert not calls
        assert source.read_text() == "input"
        call(**{each: kept, output: tmp_path / "new"})
        assert len(calls) == 1
        calls.clear()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["hard.json", "in", "link.json", "other"]


@pytest.mark.parametrize("verb", sorted(WRITE))
def test_outputs_are_different_files_that_can_be_written(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    call, kinds = _spy(VERBS[verb], calls), _paths(VERBS[verb])[1]
    (tmp_path / "file").write_text("x")
    for name, how in kinds.items():
        wrong = [tmp_path / "file" / "below", Path("/proc/none/x")]
        for path in [
            *wrong,
            *([] if how.is_folder else [tmp_path, tmp_path / "missing" / "x", tmp_path / ("x" * 250)]),
        ]:
            with pytest.raises(UsageError, match="cannot be written"):
                call(**{name: path})
        monkeypatch.setenv("RANK", "1")  # on another machine, which need not have the folder
        call(**{name: tmp_path / "missing" / "x"})
        monkeypatch.delenv("RANK")
    files = [name for name, how in kinds.items() if not how.is_folder]
    if len(files) > 1:
        with pytest.raises(UsageError, match="same file"):
            call(**dict.fromkeys(files, tmp_path / "new"))
        with pytest.raises(UsageError, match="same file"):
            call(**{files[0]: tmp_path / "new", files[1]: tmp_path / "new.run.json"})
    calls.clear()
    call(**dict.fromkeys(files, Path("/dev/null")))  # a device takes both
    assert len(calls) == 1


def test_files_that_an_input_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[dict[str, Any]] = []
    call = _spy(VERBS["infer"], calls)
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    (tmp_path / "far").mkdir()
    for name in ("photos/cats/a.jpg", "far/b.jpg", "c.jpg", "m-1.safetensors", "m.safetensors.index.json", "net.py"):
        (tmp_path / name).touch()
    (tmp_path / "photos" / "far").symlink_to(tmp_path / "far")
    (tmp_path / "photos" / "again").symlink_to(tmp_path / "photos")
    (tmp_path / "list.txt").write_text("photos\nc.jpg\r\n" + "x" * 5000 + "\n\0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"images": ["photos"]}, "photos/cats/a.jpg"), ({"images": ["photos"]}, "far/b.jpg"),
        ({"images": ["list.txt"]}, "c.jpg"), ({"images": ["list.txt"]}, "photos/cats/a.jpg"),
        ({"weights": Path("m.safetensors.index.json")}, "m-1.safetensors"), ({"model": "net:make"}, "net.py"),
        ({"model": "hf:photos,n_layer=1"}, "photos/cats/a.jpg"),
    ]  # fmt: skip
    for inputs, output in refused:
        with pytest.raises(UsageError, match="choose another --output"):
            call(**inputs, output=Path(output))
    for output in ("photos/new.csv", "far/new.csv", "x.csv", "m-2.safetensors"):
        call(images=["photos", "digits"], output=Path(output))
    # rows of an earlier run among the images
    (tmp_path / "photos" / "out.csv").touch()
    (tmp_path / "photos" / "out.csv.run.json").touch()
    call(images=["photos"], output=Path("photos/out.csv"))
    assert len(calls) == 5


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_a_path_that_is_not_text_is_refused(verb: str) -> None:
    calls: list[dict[str, Any]] = []
    call, (read, written) = _spy(VERBS[verb], calls), _paths(VERBS[verb])
    for name in (*read, *written):
        for value in (Path("x\udcff"), ["y", "x\udcff"]):
            with pytest.raises(UsageError, match="UTF-8"):
                call(**{name: value})
    assert not calls


def test_the_key_of_a_run_and_the_file_of_its_cluster(
    penstock: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, key = tmp_path / "c.toml", tmp_path / "key"
    cluster.write_text(write_cluster(make_cluster(1)))
    key.write_text("secret")
    for option in (["-o", cluster], [f"-o{cluster}"], [f"--json={cluster}"], ["--trace", tmp_path]):
        status, _, err = penstock("infer", SMALL, "--images", "x", "--cluster", cluster, *option)
        assert (status, err.count("\n"), "choose another" in err) == (2, 1, True)
    monkeypatch.setenv("PENSTOCK_KEY", str(key))
    assert penstock("infer", SMALL, "--images", "digits", "-o", key)[0] == 2
    assert key.read_text() == "secret"


@pytest.fixture(scope="module")
def around(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs of quick verbs, with links, folders and a file that nobody may write."""
    folder = tmp_path_factory.mktemp("around") / "here"
    (folder / "folder").mkdir(parents=True)
    write_profile(folder / "profile.json", make_profile([0.1] * 4, [1000.0] * 5))
    (folder / "cluster.toml").write_text(write_cluster(make_cluster(1, 0.5, memory_bytes=10**9)))
    torch.save({"w": torch.zeros(2)}, folder / "a.pth")
    (folder / "mine.json").write_text(json.dumps({"devices": [["F0", "B0"]]}))
    for name in ("profile.json", "cluster.toml", "a.pth", "mine.json"):
        (folder / f"link-{name}").symlink_to(name)
        os.link(folder / name, folder / "folder" / f"hard-{name}")
    tiny = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=8, patch_size=4, num_classes=2)
    save_file(tiny.state_dict(), folder / "w.safetensors")
    for index in range(4):
        (folder / "photos" / "ab"[index % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (60 * index, 0, 0)).save(folder / "photos" / "ab"[index % 2] / f"{index}.png")
    save_model(folder / "speaker")
    (folder / "prompts.txt").write_text("A pipe\nwater\n")
    for name in ("w.safetensors", "prompts.txt"):
        (folder / f"link-{name}").symlink_to(name)
        os.link(folder / name, folder / "folder" / f"hard-{name}")
    (folder / "read-only").touch(0o400)
    (folder / "dangling").symlink_to("nowhere")
    return folder


NAMES = [
    "profile.json", "cluster.toml", "a.pth", "mine.json", "link-profile.json", "link-a.pth", "folder/hard-profile.json",
    "folder/hard-cluster.toml", "folder/hard-a.pth", "folder/hard-mine.json", "folder", ".", "new", "folder/new",
    "missing/new", "read-only", "dangling", "folder/../a.pth", "/dev/null",
]  # fmt: skip
SLOW_NAMES = [*NAMES, "w.safetensors", "link-w.safetensors", "folder/hard-w.safetensors", "photos", "photos/a/0.png",
              "photos/a", "speaker", "speaker/config.json", "prompts.txt", "link-prompts.txt"]  # fmt: skip
TINY = "timm:vit_tiny_patch16_224,depth=1,img_size=8,patch_size=4,num_classes=2 --weights w.safetensors"
SLOW = {
    f"infer {TINY} --images photos --stages 1": (["w.safetensors", "photos/a/0.png"], ["-o", "--json", "--trace"]),
    f"train {TINY} --data photos --validation photos --batch-size 2":
        (["w.safetensors", "photos/a/0.png"], ["-o", "--json", "--trace"]),
    "generate hf:speaker --file prompts.txt --stages 1 --max-new-tokens 2 --max-length 64":
        (["prompts.txt", "speaker/config.json"], ["-o", "--json", "--set=trace="]),
    f"split {TINY}": (["w.safetensors"], ["--json"]),
}  # fmt: skip
QUICK = {
    "plan profile.json cluster.toml": (["profile.json", "cluster.toml"], ["-o", "--json"]),
    "convert a.pth": (["a.pth"], ["-o", "--json"]),
    "schedule mine.json": (["mine.json"], ["--json"]),
    "hosts key": ([], [""]),
    "lab init --force": ([], ["-o", "--json"]),
}


@given(verb=st.sampled_from(sorted(QUICK)), outputs=st.lists(st.sampled_from(NAMES), min_size=2, max_size=2))
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_input_is_unchanged_whatever_the_outputs_are(
    around: Path, penstock: Run, monkeypatch: pytest.MonkeyPatch, verb: str, outputs: list[str]
) -> None:
    check_unchanged(around, penstock, monkeypatch, verb, *QUICK[verb], outputs)


@pytest.mark.parametrize("command", first(2, [*SLOW]))
@given(outputs=st.lists(st.just("fresh") | st.sampled_from(SLOW_NAMES), min_size=3, max_size=3))
@example(outputs=["fresh"] * 3)
@settings(max_examples=examples(4), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_input_of_a_slow_verb_is_unchanged(
    around: Path, penstock: Run, monkeypatch: pytest.MonkeyPatch, command: str, outputs: list[str]
) -> None:
    names = [f"{name}{index}" if name == "fresh" else name for index, name in enumerate(outputs)]
    status = check_unchanged(around, penstock, monkeypatch, command, *SLOW[command], names)
    assert status == 0 or set(outputs) != {"fresh"}


def check_unchanged(
    around: Path, penstock: Run, monkeypatch: pytest.MonkeyPatch, command: str, inputs: list[str], options: list[str],
    outputs: list[str],
) -> int:  # fmt: skip
    """Run a command in a copy of the folder, with outputs; return its status."""
    here = around.parent / "try"
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(around, here, symlinks=True)
    for name in inputs:  # a copy has no hard links
        if (hard := here / "folder" / f"hard-{name}").exists():
            hard.unlink()
            os.link(here / name, hard)
    monkeypatch.chdir(here)
    before = {name: (here / name).read_bytes() for name in inputs}
    pairs = zip(options, outputs, strict=False)
    joined = [(option + output, "") if option[-1:] == "=" else (option, output) for option, output in pairs]
    words = [word for pair in joined for word in pair if word]
    status, _, err = penstock(*command.split(), *words)
    assert status in (0, 1, 2)
    assert "Traceback" not in err
    assert {name: (here / name).read_bytes() for name in inputs} == before
    assert not list(here.rglob(".*"))
    return status
