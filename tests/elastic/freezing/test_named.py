"""Policies by name."""

from fractions import Fraction

import pytest

from penstock.elastic.epochs import FreezePolicy
from penstock.elastic.freezing import ByHand, ClosedForm, Delayed, GradientNorms, Guarded, Never, Plateau, read_policy
from penstock.errors import UsageError


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("none", Never()),
        ("gradient-norms", GradientNorms()),
        ("gradient-norms:1/4", GradientNorms(Fraction(1, 4))),
        ("schedule", ClosedForm()),
        ("schedule:1/3", ClosedForm(Fraction(1, 3))),
        ("schedule:0.25", ClosedForm(0.25)),
        ("schedule:.5", ClosedForm(0.5)),
        ("plateau", Plateau()),
        ("plateau:3", Plateau(patience=3)),
        ("0,4,7", ByHand([0, 4, 7])),
        ("4", ByHand([4])),
        ("schedule:1/3+after", Delayed(ClosedForm(Fraction(1, 3)), num_epochs=1)),
        ("0,4+after:2", Delayed(ByHand([0, 4]), num_epochs=2)),
        ("schedule+after:2+guard:0.02", Guarded(Delayed(ClosedForm(), num_epochs=2), max_drop=0.02)),
        ("gradient-norms+guard", Guarded(GradientNorms())),
        ("gradient-norms:1/4+guard:0.02", Guarded(GradientNorms(0.25), max_drop=0.02)),
        ("0,4,7+take-back", Guarded(ByHand([0, 4, 7]), then="take back")),
        (" plateau:3+take-back:0.02 ", Guarded(Plateau(patience=3), max_drop=0.02, then="take back")),
    ],
)
def test_policy_is_read_by_name(text: str, policy: FreezePolicy) -> None:
    assert read_policy(text) == policy


@pytest.mark.parametrize(
    "text",
    ["", "always", "none:1", "schedule:", "schedule:third", "schedule:1/0", "schedule:nan", "schedule:1e-3", "plateau:",
     "plateau:2.5", "plateau:-1", "0,4,", "0,-4", "0 4 7", "schedule+", "schedule+guard:", "schedule+guard:x",
     "schedule+guards", "schedule+guard+take-back", "schedule+after:", "schedule+after:x", "schedule+after:1.5",
     "schedule+after+after", "schedule+guard+after", "after:1", "٣", "schedule:٣"],
)  # fmt: skip
def test_unknown_policy_names_the_known_ones(text: str) -> None:
    with pytest.raises(UsageError) as error:
        read_policy(text)
    assert str(error.value) == (
        f"{text!r} is not a freezing policy; use none, gradient-norms[:ALPHA], schedule[:ALPHA], plateau[:EPOCHS] or "
        "numbers of layers by epoch like 0,4,7, optionally followed by +after[:EPOCHS] and +guard[:DROP] or "
        "+take-back[:DROP]"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schedule:4/3", "between 0 and 1; got 4/3; use 1/3"),
        ("gradient-norms:1", "between 0 and 1; got 1; use 1/3"),
        ("plateau:0", r"at least 1 .* got 0; use 2"),
        ("schedule+after:0", "at least 1 epoch; got 0; leave the delay out"),
        ("schedule+guard:1.5", r"got 1\.5; use 0\.01"),
    ],
)
def test_arguments_out_of_range(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_policy(text)
