"""Help of a command: its options in groups, one line each if they fit into 80 columns."""

import re
from typing import Any

from typer.core import TyperCommand

from penstock.errors import UsageError

# the groups of all options; an option has the same meaning in every command
GROUPS = {
    "Input and output": """
        images labels class-order skip-damaged top logits data test validation prompt file system output
        resume num-images num-rows num-test-rows length json config set write-config
    """,
    "Model": "model weights pretrained seed preprocess runtime device threads training",
    "Stages": """
        stages cut plan replicas devices processes schedule microbatches microbatch-size batch-size slots
        max-length depth work all
    """,
    "Answers": "max-new-tokens temperature top-p top-k speculate",
    "Serving": """
        host port api-keys open allow-origin strict name most-waiting deadline drain max-body certificate
        certificate-key
    """,
    "Aim": "aim target max-drop accuracy-floor target-speedup max-error",
    "Candidates": "rows alternate ratio importance everywhere round-to optimizer-state explain",
    "Measuring": "repeats passes serial-images peer generate one-call train profile",
    "Training": """
        epochs steps optimizer lr lr-schedule weight-decay clip autocast checkpointing teacher hold-out num-workers
        checkpoint-every keep-best
    """,
    "Elastic training": """
        elastic freeze pack replicate cache cache-dir cache-limit cache-dtype cache-views
    """,
    "Several trainings": "compare",
    "Machines": "cluster on on-loss wait-for join costs from-cluster bind key patience",
    "Recording": "trace torch-profiler live track report",
}
_GROUP_OF = {f"--{name}": title for title, names in GROUPS.items() for name in names.split()}
_VALUES = {"int": "N", "float": "X", "str": "TEXT", "list": "TEXT", "path": "PATH"}
_OLD, _NEW = "--policy", "--cut"
_WIDEST = 26  # column of the options


def group_of(option: Any) -> str:
    """Return the title of an option's group; raises `KeyError` if the option is in no group."""
    return _GROUP_OF[max(option.opts, key=len)]


class Verb(TyperCommand):
    """A command whose help has the options in groups."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read the options; raises `UsageError` for one that is only a setting in a file, with the way to give it."""
        known = {name for each in self.get_params(ctx) for name in (*each.opts, *each.secondary_opts)}
        for word in args:
            option = word.partition("=")[0]
            name = option.removeprefix("--").removeprefix("no-").replace("-", "_")
            if option[:2] == "--" and option not in known and name in getattr(self.callback, "settings", ()):
                raise UsageError(f"{option} is a setting without an option; give --set {name}=VALUE")
            if option == _OLD and _NEW in known:
                raise UsageError(f"{option} has another name: {_NEW} takes policies too, as in {_NEW} equal-blocks")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options by group."""
        found: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{title: [] for title in GROUPS}}
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if record is not None and each.name != "help":
                name, text = _values(record[0]), _without_limits(record[1])
                if each.param_type_name == "argument":
                    found["Arguments"].append((each.metavar or name, text.removesuffix(" [required]")))
                else:
                    found[group_of(each)].append((name, text))
        for title, rows in found.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=_WIDEST)


def _values(text: str) -> str:
    """Shorten the type of an option's value.

    >>> _values("--stages <int range>"), _values("-o, --output <path>")
    ('--stages N', '-o, --output PATH')
    """
    return re.sub(r" <([a-z]+)[^>]*>", lambda found: f" {_VALUES.get(found[1], found[1].upper())}", text)


def _without_limits(text: str) -> str:
    """Remove the limits of a number from an option's help; the error message names them.

    >>> _without_limits("Rows.  [default: 1; x>=1]"), _without_limits("Rows.  [x>=1]")
    ('Rows. [default: 1]', 'Rows.')
    """
    help_text, _, more = text.partition("  [")
    kept = [part for part in more.removesuffix("]").split("; ") if part and not re.search(r"x[<>]", part)]
    return f"{help_text} [{'; '.join(kept)}]" if kept else help_text
