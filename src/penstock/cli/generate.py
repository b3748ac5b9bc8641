"""`penstock generate` and `penstock chat`: answers of a language model in stages."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.cli import options as opt
from penstock.cli.cluster import Cluster
from penstock.cli.config import Given, settings_of, takes_config
from penstock.errors import RunError, UsageError, exclude
from penstock.spec.settings import ChatSettings, LanguageSettings, TextSettings
from penstock.text import counted, say

if TYPE_CHECKING:
    from penstock.group.world import World


_CHAT_LENGTH = 2048


@takes_config(TextSettings)
def generate(*, given: Given, cluster: Cluster = None, json: opt.JsonFile = None) -> None:
    """Answer prompts with a transformers language model: in order, many at a time."""
    settings = settings_of(TextSettings, given)
    opt.bind_to(settings.bind, cluster)
    if not settings.prompt and settings.file is None:
        raise UsageError('a prompt is needed; give --prompt "Once upon a time" or --file prompts.jsonl')
    if settings.prompt and settings.file is not None:
        raise UsageError("--prompt and --file exclude each other; give one of them")
    _ = settings.sampling  # raises if its options contradict each other
    first, world, on_loss = join(settings.on_loss, settings.trace)
    if not first:
        return
    from penstock.recipes.texts import answer_prompts, open_generator, read_prompts

    settings = msgspec.structs.replace(settings, on_loss=on_loss)
    prompts = settings.prompt if settings.file is None else read_prompts(Path(settings.file))
    with world if world is not None else nullcontext(), open_generator(settings, world) as generator:
        said = answer_prompts(generator, prompts, settings)
        encodes = generator.model.config.is_encoder_decoder
    if settings.output is None:
        for row in said["rows"]:
            if row["num_tokens"]:
                say(row["text"] if encodes else f"{row['prompt']}{row['text']}")
    say(
        f"{counted(said['num_tokens'], 'token')} in {said['seconds']:.1f} s, {said['tokens_per_s']:.1f} tokens/s",
        err=True,
    )
    opt.write_json(json, said)
    if unanswered := said["unanswered"]:
        raise RunError(
            f"{len(unanswered)} of {said['num_prompts']} prompts were not answered; the first one is prompt "
            f"{unanswered[0]['prompt']}: {unanswered[0]['reason']}"
        )


def join(on_loss: str | None, trace: str | None = None) -> "tuple[bool, World | None, str]":
    """Join the processes of a run, if any; returns whether this is the first, their world, and the on-loss action.

    The action is "stop" if torchrun's agents would end all processes anyway. On other ranks this returns only when
    their work is done. Raises `UsageError` if the requested action is not possible.
    """
    from penstock.deploy.worker import follow
    from penstock.group.entry import join_torchrun, under_torchrun
    from penstock.wire import FEEDER

    survives = on_loss not in {None, "stop"}
    exclude("--trace or --on-loss", survives and trace is not None, "a run whose devices may change cannot be traced")
    action = on_loss or ("stop" if trace is not None else "continue")
    if not under_torchrun():
        return True, None, action
    world = join_torchrun(followed=True, again=action != "stop")
    if world.membership is None and on_loss is None:
        action = "stop"
    if world.rank == FEEDER:
        return True, world, action
    follow(world)
    return False, None, action


def chat_length(settings: LanguageSettings) -> int | None:
    """Return the maximum number of tokens of a conversation."""
    return settings.max_length or (None if settings.plan is not None else _CHAT_LENGTH)


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
