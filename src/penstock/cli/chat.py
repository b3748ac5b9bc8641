"""`penstock chat`: a conversation with a language model in stages."""

import sys
from contextlib import nullcontext

import msgspec

from penstock.cli import options as opt
from penstock.cli.cluster import Cluster
from penstock.cli.config import takes_config
from penstock.cli.generate import chat_length, join
from penstock.cli.settings_options import Given, settings_of
from penstock.errors import UsageError
from penstock.spec.settings import ChatSettings
from penstock.terminal.notes import say


@takes_config(ChatSettings)
def chat(*, given: Given, cluster: Cluster = None) -> None:
    """Chat with a transformers language model; an empty line or Ctrl-D ends the chat."""
    settings = settings_of(ChatSettings, given)
    opt.bind_to(settings.bind, cluster)
    sampling = settings.sampling | {"seed": settings.seed}
    first, world, on_loss = join(settings.on_loss, settings.trace)
    if not first:
        return
    from penstock.recipes.texts import Conversation, answer_ends, open_generator

    slots = settings.slots or (None if settings.plan else 1)
    settings = msgspec.structs.replace(settings, slots=slots, max_length=chat_length(settings), on_loss=on_loss)
    with world if world is not None else nullcontext(), open_generator(settings, world, chats=True) as generator:
        conversation = Conversation(
            generator, settings.system, eos_token_id=answer_ends(generator, settings.model), **sampling
        )
        while text := _read("> " if sys.stdin.isatty() else ""):
            try:
                for part in conversation.ask(text):
                    sys.stdout.write(part)
                    sys.stdout.flush()
                sys.stdout.write("\n")
            except UsageError as error:  # the conversation is too long; a new one can be started
                say(str(error), err=True)


def _read(prompt: str) -> str:
    try:
        return input(prompt).strip()
    except EOFError:
        return ""
