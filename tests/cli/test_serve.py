"""`penstock serve`: what is refused before a model is loaded."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import SMALL

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--api-keys"),
        (("--open", "--api-keys", "keys"), "--open"),
        (("--open", "--host", "0.0.0.0"), "0.0.0.0"),
        (("--open", "--host", "example.invalid"), "example.invalid"),
        (("--open", "--certificate", "a.pem"), "--certificate-key"),
        (("--api-keys", "not-there"), "not-there"),
        (("--open", "--set", 'allow_origin=["https://a.example/"]'), "https://a.example/"),
        (("--open", "--set", 'allow_origin=["a.example"]'), "a.example"),
        (("--open", "--certificate", "a", "--certificate-key", "b"), "PEM"),
    ],
)
def test_options_that_do_not_go_together(penstock: Run, words: tuple[str, ...], said: str) -> None:
    status, _, err = penstock("serve", SMALL, *words)
    assert status == 2
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("a-long-enough-key-0123456", 0o644, "chmod 600"),
        ("short", 0o600, "16"),
        ("", 0o600, "keys"),
        ("a b" * 9, 0o600, "16"),
    ],
)
def test_invalid_keys_are_refused(penstock: Run, tmp_path: Path, text: str, mode: int, said: str) -> None:
    keys = tmp_path / "keys"
    keys.write_text(text)
    keys.chmod(mode)
    status, _, err = penstock("serve", SMALL, "--api-keys", keys)
    assert status == 2
    assert said in err


def test_a_port_in_use(penstock: Run) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        status, _, err = penstock("serve", SMALL, "--open", "--port", port)
    assert (status, str(port) in err) == (2, True)


def test_unservable_model_is_refused(penstock: Run) -> None:
    status, _, err = penstock("serve", "hf:gpt2,n_layer=1", "--open", "--port", 0)
    assert (status, "tokenizer" in err) == (2, True)
