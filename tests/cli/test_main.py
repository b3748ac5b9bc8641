"""Exit statuses and how errors reach people."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from penstock import __version__
from penstock.cli import main as main_module
from penstock.cli.cluster import take_cluster
from penstock.cli.main import main
from penstock.cli.options import GROUPS
from penstock.recipes.settings import FitSettings
from penstock.spec.settings import BenchSettings, PredictSettings, ServeSettings, TextSettings
from tests.processes import run_python

Run = Callable[..., tuple[int, str, str]]


def test_version_is_printed(penstock: Run) -> None:
    assert penstock("--version") == (0, f"penstock {__version__}\n", "")


def test_help_names_every_verb(penstock: Run) -> None:
    status, out, _ = penstock("--help")
    assert status == 0
    for verb in ("demo", "split", "convert", "infer", "bench", "lab"):
        assert f"\n  {verb} " in out


@pytest.mark.fresh
def test_the_list_of_verbs_comes_without_torch() -> None:
    for arguments, status in ((["--help"], 0), (["no-such-verb"], 2)):
        code = (
            f"import sys; from penstock.cli.main import main; s = main({arguments}); print(s, 'torch' in sys.modules)"
        )
        found = run_python("-c", code, deadline_s=60.0)
        assert found.stdout.splitlines()[-1] == f"{status} False"


@pytest.mark.fresh
@pytest.mark.parametrize(("typed", "offered"), [("penstock in", ["infer"]), ("penstock infer --sta", ["--stages"])])
def test_a_shell_completes_verbs_and_their_options_without_torch(typed: str, offered: list[str]) -> None:
    said = "atexit.register(lambda: print('torch' in sys.modules))"
    code = f"import atexit, sys; from penstock.cli.main import main; sys.argv[0] = 'penstock'; {said}; main([])"
    env = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    found = run_python("-c", code, deadline_s=60.0, env=env)
    assert found.stdout.splitlines() == [*offered, "False"]


@pytest.mark.parametrize("verb", main_module._HELP)
def test_each_verb_has_its_own_help(verb: str, penstock: Run) -> None:
    status, out, _ = penstock(verb, "--help")
    assert status == 0
    assert f" {verb} [OPTIONS]" in next(line for line in out.splitlines() if line.startswith("Usage: "))


@pytest.mark.parametrize("verb", [verb for verb in main_module._HELP if verb not in {"hosts", "keys", "lab"}])
def test_help_has_groups_and_fits_a_screen(verb: str, penstock: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = penstock(verb, "--help")[1].splitlines()  # an option without a group is an error
    assert max(map(len, lines)) <= 80
    assert verb == "train" or len(lines) <= 50
    titles = [line.removesuffix(":") for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles == [title for title in ("Arguments", *GROUPS) if title in titles]


def test_a_name_is_in_one_group() -> None:
    names = " ".join(GROUPS.values()).split()
    assert len(set(names)) == len(names)
    app: Any = typer.main.get_command(main_module.app)
    context = app.make_context("penstock", [], resilient_parsing=True)
    options = [option for verb in main_module._HELP for option in app.get_command(context, verb).params]
    flags = {flag.removeprefix("--") for option in options for flag in (*option.opts, *option.secondary_opts)}
    structs = (FitSettings, PredictSettings, TextSettings, ServeSettings, BenchSettings)
    assert set(names) <= flags | {name.replace("_", "-") for struct in structs for name in struct.rare}


def test_old_verb_names_the_new_one(penstock: Run) -> None:
    status, _, err = penstock("keys", "new", "run.key")
    assert (status, err) == (2, "error: penstock keys has another name: penstock hosts key FILE\n")


@pytest.mark.parametrize(
    "arguments",
    [["split"], ["split", "timm:vit_tiny_patch16_224", "--stages", "0"], ["no-such-verb"], ["infer", "x", "--bogus"]],
)
def test_wrong_usage_ends_with_2(arguments: list[str], penstock: Run) -> None:
    assert penstock(*arguments)[0] == 2


def test_an_error_is_one_line(penstock: Run) -> None:
    status, out, err = penstock("split", "timm:vit_tinny_patch16_224")
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "vit_tiny_patch16_224" in err  # the nearest name


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(Exception, match="no_such_module"):
        main(["--debug", "split", "no_such_module:make"])


def test_escape_sequences_in_names_are_shown(penstock: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = penstock("infer", "timm:vit_tiny_patch16_224", "--images", "no\x1b[2Jthing\nat all")
    assert status == 2
    assert "\x1b" not in out + err
    assert r"no\x1b[2Jthing\nat all" in err
    assert err.count("\n") == 1, "an error is one line"


def test_paths_of_subcommands_and_of_clusters_may_begin_at_home(
    penstock: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    for name in ("a.key", "b.key"):  # a command that runs twice in one process
        assert penstock("hosts", "key", f"~/{name}")[0] == 0
        assert (tmp_path / "home" / name).exists()
    assert take_cluster(["infer", "--cluster=~/c.toml"])[0] == tmp_path / "home" / "c.toml"
    assert penstock("convert", "~/none.pth", "--output=~/x.safetensors")[2].startswith(
        f"error: checkpoint {tmp_path / 'home' / 'none.pth'} not found"
    )
    assert not (tmp_path / "~").exists()
