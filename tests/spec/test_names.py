"""Names of devices, hosts and files."""

import pytest

from penstock.errors import PlanError
from penstock.spec.fields import check_name, is_name


@pytest.mark.parametrize(
    "name", ["a", "host0", "name:1", "pi-4.local", "192.168.1.10", "fe80::1", "rack_3+gpu", "me@board", "N" * 128]
)
def test_valid_names_are_accepted(name: str) -> None:
    assert is_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "../../x", "a/b", "a\\b", "/etc", "-rf", ".hidden", "two words", "line\n", "tab\t", "\x1b[2J",
        "nul\0", "<b>", "a\"b", "a'b", "$(x)", "`x`", "*", "caf\u00e9", "\u202eabc", "n" * 129, None, 7, ["a"],
    ],
)  # fmt: skip
def test_invalid_names_are_refused_in_one_line(name: object) -> None:
    assert not is_name(name)
    with pytest.raises(PlanError) as caught:
        check_name("the name", name, PlanError)
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()


def test_name_error_has_the_rule_and_the_value() -> None:
    with pytest.raises(PlanError) as caught:
        check_name("a device's name", "../../x", PlanError)
    assert str(caught.value) == (
        "a device's name must be 1 to 128 letters, digits or . _ : + @ - and start with a letter, a digit or _; "
        "got '../../x'; rename it"
    )
