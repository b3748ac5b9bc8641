"""The size of the project, counted: a number that grows is raised here with its reason, one that shrinks is lowered.

    python -m tests.test_budget       # write today's numbers into the table below

A commit that changes a number changes its row; the reason for a larger one is a comment at its end.
"""

import ast
import inspect
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import typer

import penstock
from penstock.cli.main import app

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "penstock"
_LEAVE_OUT = re.compile(r"\bleave\b[^.;]{0,90}?\bout\b")

# lines and files of each room
ROOMS: dict[str, tuple[int, int]] = {
    "bench": (725, 4),
    "cli": (3267, 20),  # +499: fits; settings in files, paths read and written, preparation of images
    "cluster": (3120, 16),  # +3: waiting times that are arguments, as in serve and transport
    "compress": (985, 5),
    "deploy": (2157, 10),  # +46: the loop of a stream, which was in engine
    "elastic": (2196, 9),
    "engine": (2931, 14),  # +200: events of a GPU instead of waits; messages sent while it computes the next
    "generate": (2435, 8),  # +147: rotary factors and windows by row; inputs as of model.generate; +75: draws on a GPU
    "graph": (5091, 20),  # +840: changes of the live module, random draws, steps of decoders
    "group": (3047, 13),  # +120: mpirun's and wrong variables, ranks that wait, calls that failed, folders left
    "measure": (1212, 5),  # +45: bytes counted without values
    "modules": (2456, 16),  # +525: formats of blocks; random states; Pipe; outputs; +15: errors of all ranks
    "plan": (4917, 23),  # +144: needs of stages
    "recipes": (3704, 15),  # +620: counted costs, profiles; class orders, label files, damaged images, rows of others
    "report": (3834, 16),
    "runtime": (4251, 21),  # +15: a GPU beside CPUs; +266: torch.compile; +225: products in the bits of a file
    "serve": (2586, 14),  # +780: what clients of other servers send; bytes of tokens; limits, trials, foreign pages
    "spec": (1202, 6),
    "stream": (1379, 6),
    "terminal": (421, 4),  # +4: waiting times that are arguments
    "tracing": (457, 3),  # +3: the wait for a buffer apart from the send
    "train": (8264, 33),  # +1,817: rows are loaded once; inputs' gradients; scalers, groups and live tensors of stages
    "transport": (1991, 11),  # +7: whether a message is there, without waiting
    "zoo": (4887, 26),  # +1,936: GGUF by tensor, quantized checkpoints, those of scripts and DCP, archives
}

# options of each verb, its subcommands' together
OPTIONS = {
    "penstock bench": 16,
    "penstock chat": 17,
    "penstock compress": 24,
    "penstock convert": 4,  # +1: --key
    "penstock demo": 3,
    "penstock fits": 14,  # what each machine needs, before a start; +1: --device
    "penstock generate": 20,
    "penstock hosts": 28,
    "penstock infer": 20,
    "penstock lab": 34,
    "penstock plan": 18,
    "penstock profile": 18,  # +1: --cache-dtype; +1: --device
    "penstock report": 3,
    "penstock schedule": 5,
    "penstock serve": 20,
    "penstock split": 12,  # +1: writes a bundle, as `penstock bundle` did
    "penstock train": 38,  # rare settings in a file: --config, --set
    "penstock worker": 4,
}

TOTALS = {
    "lines of src": 67515,  # +5,213: silent faults of scripts, text, folders, files; +1,625: the formatter's own lines
    "files of src": 318,  # +29
    "lines of tests": 44310,  # +5,122: silent faults of scripts, text, folders and files; own classifiers
    "lines of benchmarks": 9919,  # +150: every decoder of transformers; +150: compiled beside eager
    "keyword arguments of Pipeline": 18,
    "public names": 14,
    "leave … out messages": 45,  # +6: devices, adapters and options that cannot be combined
    "class names used twice": 0,
    "fmt: skip": 100,
    "nouns on the walk of a microbatch": 25,  # these three as a reader counted them
    "nouns on the walk of a gradient": 26,
    "nouns on the walk of a lost process": 35,
}


@cache
def trees() -> list[ast.Module]:
    return [*map(ast.parse, sources().values())]


@cache
def sources() -> Mapping[Path, str]:
    return {path.relative_to(SOURCE): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


def lines(folder: str) -> int:
    return sum(path.read_text().count("\n") for path in (ROOT / folder).rglob("*.py"))


def rooms() -> dict[str, tuple[int, int]]:
    """Return lines and files of each package, and of the modules beside them together."""
    sizes: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path, text in sources().items():
        room = path.parts[0] if len(path.parts) > 1 else "modules"
        sizes[room] += text.count("\n")
        files[room] += 1
    return {room: (sizes[room], files[room]) for room in sorted(sizes)}


def options() -> dict[str, int]:
    """Return the number of options and arguments of each verb, without --help."""

    def count(command: Any) -> int:
        own = [parameter for parameter in command.params if parameter.name != "help"]
        return len(own) + sum(map(count, getattr(command, "commands", {}).values()))

    group: Any = typer.main.get_command(app)
    context = typer.Context(group)
    return {f"penstock {name}": count(group.get_command(context, name)) for name in group.list_commands(context)}


def messages() -> Iterator[str]:
    """Yield every text of the source, its placeholders as {}."""
    for tree in trees():
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                yield node.value


def class_names() -> Counter[str]:
    return Counter(node.name for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def nouns() -> dict[str, list[str]]:
    return tomllib.loads((ROOT / "docs" / "nouns.toml").read_text())


def totals() -> dict[str, int]:
    walks = nouns()
    parameters = inspect.signature(penstock.Pipeline).parameters.values()
    return {
        "lines of src": sum(size for size, _ in rooms().values()),
        "files of src": sum(count for _, count in rooms().values()),
        "lines of tests": lines("tests"),
        "lines of benchmarks": lines("benchmarks"),
        "keyword arguments of Pipeline": sum(p.kind is p.KEYWORD_ONLY for p in parameters),
        "public names": len(penstock.__all__),
        "leave … out messages": sum(len(_LEAVE_OUT.findall(text)) for text in messages()),
        "class names used twice": sum(count > 1 for count in class_names().values()),
        "fmt: skip": sum(text.count("# fmt: skip") for text in sources().values()),
        "nouns on the walk of a microbatch": len(walks["microbatch"]),
        "nouns on the walk of a gradient": len(walks["gradient"]),
        "nouns on the walk of a lost process": len(walks["loss"]),
    }


def test_rooms_have_the_sizes_of_their_rows() -> None:
    assert rooms() == ROOMS


def test_verbs_have_as_many_options_as_their_rows() -> None:
    assert options() == OPTIONS


def test_totals_are_those_of_their_rows() -> None:
    assert totals() == TOTALS


def test_nouns_of_the_walks_exist() -> None:
    names = class_names()
    for walk, met in nouns().items():
        assert sorted(met) == met, f"the nouns of the walk of a {walk} in order"
        assert [noun for noun in met if noun not in names] == []


if __name__ == "__main__":
    table = Path(__file__).read_text()
    for rows in (rooms(), options(), totals()):
        for name, number in rows.items():
            table = re.sub(rf'(?m)^    "{re.escape(name)}": [^#\n]*,', f'    "{name}": {number},', table)
    Path(__file__).write_text(table)
