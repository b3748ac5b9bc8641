"""Trials of chat templates and grammars in a process with limits, before this one, whose threads cannot be stopped."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from penstock.errors import DataError

LIMIT_S = 5.0
_LIMIT_BYTES = 384 << 20
_STEPS = 16  # of a grammar


class Trial:
    """A process that renders a template, or builds a grammar, and ends if that exceeds the limits.

    Example:
        with contextlib.closing(Trial(tokenizer)) as trial:
            trial.grammar({"type": "object"})

    Raises `DataError` for what exceeds the limits; every other error is left to the real attempt. For one thread at a
    time.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[bytes] | None = None

    def template(self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]) -> int:
        """Render messages in the tokenizer's template; return the number of characters, or 0 if it fails."""
        if getattr(self._tokenizer, "chat_template", None) is None:
            return 0
        asked = {"conversations": [messages], "chat_template": self._tokenizer.get_chat_template()}
        return self._ask("the chat template", template=self._tokenizer.special_tokens_map | options | asked)

    def grammar(self, schema: Mapping[str, Any]) -> None:
        """Build the grammar of a schema, and follow it for some tokens."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            self._ask("the schema", schema=json.dumps(schema), end=self._tokenizer.eos_token_id, words=backend.to_str())

    def start(self) -> None:
        """Start the process, unless it runs."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._connection, theirs = Pipe()
            command = [sys.executable, "-m", "penstock.serve.trial", str(theirs.fileno()), str(LIMIT_S)]
            # in a session of its own: Ctrl-C is for the server
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            theirs.close()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()
            self._process = None

    def _ask(self, what: str, **asked: Any) -> int:
        self.start()
        try:
            self._connection.send_bytes(json.dumps(asked, default=str).encode())
            return int(self._connection.recv_bytes())
        except (EOFError, OSError):
            if self._process is not None:
                self._process.wait()
            raise DataError(
                f"{what} takes more than {LIMIT_S:g} s or {_LIMIT_BYTES >> 20} MiB; make it smaller"
            ) from None


def _serve(connection: Connection, limit_s: float) -> None:
    words: dict[str, Any] = {}
    with contextlib.suppress(EOFError):
        while True:
            asked = json.loads(connection.recv_bytes())
            kind = "transformers.utils.chat_template_utils" if "template" in asked else "llguidance"
            library = import_module(kind)
            if "words" in asked and not words:
                words["all"] = library.LLTokenizer(asked["words"], eos_token=asked["end"])
            _limit_memory()
            signal.setitimer(signal.ITIMER_REAL, limit_s)  # its signal ends the process, in C and Rust too
            done = 0
            try:
                if "template" in asked:
                    done = sum(map(len, library.render_jinja_template(**asked["template"])[0]))
                else:
                    _follow(library, words["all"], asked["schema"])
            except MemoryError:
                os._exit(1)
            except Exception:  # the real attempt names it
                done = 0
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(str(done).encode())


def _limit_memory() -> None:
    """Limit what this process may allocate from now on (on Linux)."""
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def _follow(library: Any, words: Any, schema: str) -> None:
    matcher = library.LLMatcher(words, library.LLMatcher.grammar_from_json_schema(schema))
    for _ in range(_STEPS):
        allowed = matcher.compute_logit_bias()
        token = max(range(len(allowed)), key=allowed.__getitem__, default=0)
        if not matcher.consume_token(token) or matcher.is_stopped():
            break


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), float(sys.argv[2]))
