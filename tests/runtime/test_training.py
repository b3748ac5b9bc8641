"""A backward in halves gives what a whole one gives, and leaves the weights' work for later."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.runtime.training import backward_inputs, backward_weights


def compare(function: object, inputs: list[Tensor], weights: list[Tensor]) -> None:
    outputs = function(*inputs, *weights)  # type: ignore[operator]
    gradients = [torch.randn_like(output) for output in outputs]
    every = [*inputs, *weights]
    expected = torch.autograd.grad(outputs, every, gradients, retain_graph=True, allow_unused=True)
    found, rest = backward_inputs(outputs, gradients, inputs)
    found += backward_weights(rest, weights)
    for wanted, given in zip(expected, found, strict=True):
        assert (wanted is None) == (given is None)
        if wanted is not None and given is not None:
            torch.testing.assert_close(given, wanted)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_layers_in_a_row() -> None:
    def layers(x: Tensor, a: Tensor, b: Tensor, scale: Tensor, shift: Tensor) -> list[Tensor]:
        return [F.layer_norm(F.gelu(F.linear(x, a, b)) + x, (4,), scale, shift)]

    compare(layers, [leaf(3, 4)], [leaf(4, 4), leaf(4), leaf(4), leaf(4)])


def test_a_weight_used_twice_and_one_not_at_all() -> None:
    def twice(x: Tensor, a: Tensor, _unused: Tensor) -> list[Tensor]:
        return [F.linear(F.linear(x, a).relu(), a), x * 2]

    compare(twice, [leaf(3, 4)], [leaf(4, 4), leaf(4)])


def test_branch_can_join_the_sum_of_another() -> None:
    def crossing(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        table = (a * a).tanh()
        query = table @ b
        return [torch.softmax(query @ x.T, -1) @ x + table, table]

    compare(crossing, [leaf(4, 4)], [leaf(4, 4), leaf(4, 4)])


def test_a_first_stage_has_weights_alone() -> None:
    def first(a: Tensor, b: Tensor) -> list[Tensor]:
        return [F.linear(torch.ones(2, 4, dtype=torch.float64), a, b)]

    compare(first, [], [leaf(4, 4), leaf(4)])


def test_the_input_passes_through() -> None:
    def through(x: Tensor, y: Tensor, a: Tensor) -> list[Tensor]:
        return [x, F.linear(x, a) + y]

    compare(through, [leaf(2, 4), leaf(2, 4)], [leaf(4, 4)])


def test_the_first_half_computes_no_gradient_of_a_weight() -> None:
    layer = nn.Linear(4, 4)
    seen: list[str] = []
    layer.weight.register_hook(lambda _: seen.append("weight"))
    x = torch.randn(2, 4, requires_grad=True)
    found, rest = backward_inputs([layer(x)], [None], [x])
    assert found[0] is not None
    assert seen == []
    backward_weights(rest, list(layer.parameters()))
    assert seen == ["weight"]
