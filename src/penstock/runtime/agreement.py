"""Comparison of a runtime's outputs with those of eager."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.values import Value

_FURTHEST = 1e-3  # largest deviation from eager, relative to the largest number


@torch.no_grad()
def compare_outputs(
    runtime: str, values: Sequence[Value], expected: Sequence[Tensor], outputs: Sequence[Tensor]
) -> None:
    """Raise `RunError` naming the first output that differs from eager by more than rounding.

    Example:
        compare_outputs("openvino", program.outputs, eager(sizes, inputs), outputs)
    """
    for value, wanted, found in zip(values, expected, outputs, strict=True):
        if not wanted.is_floating_point():
            if not torch.equal(found, wanted):
                count = int((found != wanted).sum())
                raise RunError(
                    f"{value.name} of the runtime {runtime} differs from eager in {count} of {wanted.numel()} "
                    "elements; plan this stage with the runtime eager"
                )
            continue
        if not wanted.numel():
            continue
        finite = wanted.isfinite()
        largest = float(wanted[finite].abs().max()) if finite.any() else 0.0
        error = float((found - wanted)[finite].abs().max()) if finite.any() else 0.0
        # negated so that NaN fails
        if not error <= _FURTHEST * max(1e-6, largest) or not torch.equal(found.isfinite(), finite):
            raise RunError(
                f"{value.name} of the runtime {runtime} differs from eager by {error:.3g}; plan this stage with the "
                "runtime eager"
            )
