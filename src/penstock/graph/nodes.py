"""What torch.export's nodes say: the modules they were called in, and whether they do anything."""

from collections.abc import Mapping
from typing import Any

from torch import fx

from penstock.graph.graph import Call


def is_idle(target: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    """Return whether a call hands back its input: dropout in evaluation."""
    if target.split(".")[1] not in {"dropout", "feature_dropout", "alpha_dropout"}:
        return False
    given = [*arguments, *keywords.values()]
    return len(given) == 3 and given[2] is False


def module_calls(node: fx.Node) -> tuple[Call, ...]:
    """Read the chain of modules that a node was called in, outermost first."""
    stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    calls = []
    for key, (path, kind) in stack.items():
        if not path or path.startswith("_empty_nn_module_stack"):
            continue
        _, _, repeat = key.partition("@")
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        calls.append(Call(path=f"{path}@{repeat}" if repeat else path, kind=name.rsplit(".", 1)[-1]))
    return tuple(calls)
