"""`penstock generate`: answers of a language model in stages."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options as opt
from penstock.cli.cluster import Cluster
from penstock.cli.paths import Written
from penstock.errors import RunError, UsageError
from penstock.terminal.notes import say
from penstock.text import counted

if TYPE_CHECKING:
    from penstock.group.world import World

Stages = Annotated[int | None, typer.Option(min=1, help="Number of stages. Default: 2, or torchrun's processes.")]
Slots = Annotated[int | None, typer.Option(min=1, help="Sequences per lane, which step together. Default: 4.")]
MaxLength = Annotated[
    int | None, typer.Option(min=2, help="Limit on prompt and answer tokens. Default: 512, chats 2048.")
]
PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", metavar="FILE", help="Plan of `profile --generate`."),
]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Maximum tokens of an answer.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0: the likeliest.")]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Nucleus sampling: keep this total probability.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Keep the K likeliest tokens.")]
Runtime = Annotated[str, typer.Option(metavar="NAME", help="onnxruntime:int4 and others.")]
OnLoss = Annotated[
    str | None,
    typer.Option(metavar="ACTION", help="On a lost device stop or continue. Default: continue."),
]
Speculate = Annotated[bool, typer.Option(help="Speculative decoding while stages are idle; answers do not change.")]
SampleSeed = Annotated[int | None, typer.Option("--seed", help="Seed for sampling. Default: random.")]

_CHAT_LENGTH = 2048


def generate(
    model: opt.LanguageModel,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help='Prompts: a line each, or .jsonl with "prompt".')
    ] = None,
    output: Annotated[
        Path | None,
        Written(),
        typer.Option("--output", "-o", metavar="FILE", help="Answers, .csv or JSON lines; resumed if the file exists."),
    ] = None,
    max_new_tokens: NewTokens = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: SampleSeed = None,
    stages: Stages = None,
    policy: opt.Policy = "balanced",
    cut: opt.CutNames = None,
    plan: PlanFile = None,
    slots: Slots = None,
    max_length: MaxLength = None,
    weights: opt.WeightsFile = None,
    pretrained: opt.Pretrained = False,
    threads: opt.Threads = 1,
    device: opt.ComputesOn = "cpu",
    runtime: Runtime = "eager",
    speculate: Speculate = True,
    trace: opt.Trace = None,
    on_loss: OnLoss = None,
    bind: opt.Bind = None,
    cluster: Cluster = None,
    json: opt.JsonFile = None,
) -> None:
    """Answer prompts with a transformers language model: in order, many at a time."""
    opt.bind_to(bind, cluster)
    if not prompt and file is None:
        raise UsageError('a prompt is needed; give --prompt "Once upon a time" or --file prompts.jsonl')
    if prompt and file is not None:
        raise UsageError("--prompt and --file exclude each other; give one of them")
    first, world, on_loss = join(on_loss, trace)
    if not first:
        return
    from penstock.recipes.texts import TextSettings, answer_prompts, open_generator, read_prompts

    settings = TextSettings(
        model=model, stages=stages, policy=policy, cuts=cut or None, plan=plan, slots=slots, max_length=max_length,
        threads=threads or 1, device=device, runtime=runtime, weights=weights, pretrained=pretrained, seed=seed,
        sampling=sampling_of(temperature, top_p, top_k) | {"max_new_tokens": max_new_tokens}, speculate=speculate,
        on_loss=on_loss, trace=trace,
    )  # fmt: skip
    prompts = list(prompt) if prompt else read_prompts(file) if file is not None else []
    with world if world is not None else nullcontext(), open_generator(settings, world) as generator:
        said = answer_prompts(generator, prompts, settings, output)
        encodes = generator.model.config.is_encoder_decoder
    if output is None:
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


def join(on_loss: str | None, trace: Path | None = None) -> "tuple[bool, World | None, str]":
    """Join the processes of a run, if any; returns whether this is the first, their world, and the on-loss action.

    The action is "stop" if torchrun's agents would end all processes anyway. On other ranks this returns only when
    their work is done. Raises `UsageError` if the requested action is not possible.
    """
    from penstock.deploy.worker import follow
    from penstock.group.entry import join_torchrun, under_torchrun
    from penstock.wire import FEEDER

    if not under_torchrun():
        return True, None, opt.choose_on_loss(on_loss, trace=trace)
    asked, on_loss = on_loss, opt.choose_on_loss(on_loss, trace=trace)
    world = join_torchrun(followed=True, again=on_loss != "stop")
    if world.membership is None and asked is None:
        on_loss = "stop"
    if world.rank == FEEDER:
        return True, world, on_loss
    follow(world)
    return False, None, on_loss


def chat_length(max_length: int | None, plan: Path | None) -> int | None:
    """Return the maximum number of tokens of a conversation."""
    return max_length or (None if plan is not None else _CHAT_LENGTH)


def sampling_of(temperature: float, top_p: float | None, top_k: int | None) -> dict[str, Any]:
    """Return transformers' sampling options."""
    if not temperature:
        if top_p is not None or top_k is not None:
            raise UsageError("--top-p and --top-k need sampling; give --temperature 0.7 too")
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0 if top_k is None else top_k}
