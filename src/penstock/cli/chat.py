"""`penstock chat`: a conversation with a language model in stages."""

import sys
from contextlib import nullcontext
from typing import Annotated

import typer

from penstock.cli import generate as given
from penstock.cli import options as opt
from penstock.cli.cluster import Cluster
from penstock.errors import UsageError
from penstock.terminal.notes import say


def chat(
    model: opt.LanguageModel,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_new_tokens: given.NewTokens = 256,
    temperature: given.Temperature = 0.0,
    top_p: given.TopP = None,
    top_k: given.TopK = None,
    seed: given.SampleSeed = None,
    stages: given.Stages = None,
    policy: opt.Policy = "balanced",
    cut: opt.CutNames = None,
    plan: given.PlanFile = None,
    max_length: given.MaxLength = None,
    weights: opt.WeightsFile = None,
    pretrained: opt.Pretrained = False,
    threads: opt.Threads = 1,
    device: opt.ComputesOn = "cpu",
    runtime: given.Runtime = "eager",
    on_loss: given.OnLoss = None,
    bind: opt.Bind = None,
    cluster: Cluster = None,
) -> None:
    """Chat with a transformers language model; an empty line or Ctrl-D ends the chat."""
    opt.bind_to(bind, cluster)
    first, world, on_loss = given.join(on_loss)
    if not first:
        return
    from penstock.recipes.texts import Conversation, TextSettings, answer_ends, open_generator

    settings = TextSettings(
        model=model, stages=stages, policy=policy, cuts=cut or None, plan=plan, slots=None if plan else 1,
        max_length=given.chat_length(max_length, plan),
        threads=threads or 1, device=device, runtime=runtime, weights=weights, pretrained=pretrained, on_loss=on_loss,
    )  # fmt: skip
    sampling = given.sampling_of(temperature, top_p, top_k) | {"max_new_tokens": max_new_tokens, "seed": seed}
    with world if world is not None else nullcontext(), open_generator(settings, world, chats=True) as generator:
        conversation = Conversation(generator, system, eos_token_id=answer_ends(generator, model), **sampling)
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
