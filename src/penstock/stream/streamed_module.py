"""The module that a stream was made from, which the caller may change while the stages stay as they are."""

import weakref

from torch import nn

from penstock.errors import UsageError
from penstock.graph.graph import Graph
from penstock.graph.live_module import LiveModule, rewritten, version_of
from penstock.terminal.notes import note


class StreamedModule:
    """A model as it was when its stages were made; held weakly, so that the caller may release its memory."""

    def __init__(self, model: nn.Module, graph: Graph, *, reads_weights: bool) -> None:
        self._name = graph.model
        self._live = LiveModule(model, graph.reads, graph.left)
        named = [*model.named_parameters(), *model.named_buffers()] if reads_weights else []
        self._weights = [(name, weakref.ref(tensor), version_of(tensor)) for name, tensor in named]

    def check_unchanged(self) -> None:
        """Print a note once if the model's weights changed, which the stages do not follow.

        Raises `UsageError` if its modules, hooks or attributes changed.
        """
        if what := self._live.rebuilt() or self._live.changed():
            raise UsageError(
                f"{what}, but the stages compute what was captured; change {self._name} before, or make a new pipeline"
            )
        if any(rewritten(self._weights)):
            self._weights = []
            note(
                f"the weights of {self._name} changed after its pipeline was made, which streams with those that it "
                "had then; to use the new ones, make a new pipeline"
            )
