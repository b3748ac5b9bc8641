"""Run with `python -m benchmarks.coverage.training --json FILE [--only TEXT] [--quick]`.

One training step of every architecture in two stages with two microbatches, beside one process that accumulates the
same microbatches. The model is in training mode with every dropout at zero, since each process draws its own masks;
the loss is how far everything that the model returns is from one, as the mean of squares.
"""

import json
import logging
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.coverage import ours
from benchmarks.coverage.architectures import Architecture, asked
from penstock.train.captured import Captured
from tests.trainers import by_hand, errors, train

_SEED, _ROWS = 0, 4
_CLOSE = 1e-5


def main() -> None:
    """Train every architecture for a step, write the rows and the summary."""
    chosen, output = asked("benchmarks.coverage.training", __doc__)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    rows = []
    for architecture in chosen:
        rows.append(measure(architecture))
        print(json.dumps(rows[-1]), flush=True)
        output.write_text(json.dumps({"rows": rows, "summary": summarize(rows)}, indent=1) + "\n")
    print(json.dumps(summarize(rows)))


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the architectures whose loss and gradients are those of one process, and those that are refused."""
    equal = [row for row in rows if row["error"] is None and row["equal"]]
    return {
        "architectures": len(rows),
        "equal": len(equal),
        "refused": sum(row["error"] is not None for row in rows),
        "different": sum(row["error"] is None and not row["equal"] for row in rows),
        "gradient_error": max((row["gradient_error"] for row in equal), default=0.0),
        "loss_error": max((row["loss_error"] for row in equal), default=0.0),
    }


def measure(architecture: Architecture) -> dict[str, Any]:
    """Make the row of one architecture; what is refused is in the row, in one line."""
    begin = time.perf_counter()
    torch.manual_seed(_SEED)
    model = without_dropout(architecture.build().train())
    inputs = architecture.inputs(_ROWS)
    batches = [(inputs, torch.zeros(_ROWS))]
    row: dict[str, Any] = {"architecture": architecture.name, "error": None, "equal": False}
    # a benchmark of coverage records whatever goes wrong
    try:
        trained = Captured(model, (), {name: tensor[:2] for name, tensor in inputs.items()})
        losses, gradients, _ = train(trained, 2, batches, _sgd, loss_of, microbatches=2, stages=2)
        expected = by_hand(model, batches, _sgd, loss_of, [2])
        row["loss_error"] = abs(losses[0] - expected[0][0]) / abs(expected[0][0])
        row["gradient_error"] = max(errors(expected[1], gradients).values())
        row["equal"] = (
            set(gradients) == set(expected[1]) and row["loss_error"] < _CLOSE and row["gradient_error"] < _CLOSE
        )
    except Exception as error:
        row["error"] = ours.one_line(error)
    row["seconds"] = round(time.perf_counter() - begin, 2)
    return row


def loss_of(output: Any, _labels: Tensor) -> Tensor:
    """Return how far every tensor of floating point numbers is from one, which no parameter begins at."""
    returned = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
    return torch.stack([(x.float() - 1).pow(2).mean() for x in returned]).sum()


def without_dropout(model: nn.Module) -> nn.Module:
    """Set everything that a model drops at random to zero."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or name == "p"):
                setattr(module, name, 0.0)
        config = getattr(module, "config", None)
        for name, value in vars(config).items() if config is not None else ():
            if isinstance(value, float) and ("drop" in name or name.endswith("_pdrop")):
                setattr(config, name, 0.0)
    return model


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


if __name__ == "__main__":
    main()
