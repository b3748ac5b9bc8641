"""`penstock serve`: a model in stages that answers over HTTP."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import generate as given
from penstock.cli import options as opt
from penstock.cli.cluster import Cluster
from penstock.errors import UsageError


def serve(
    model: opt.AnyModel,
    host: Annotated[str, typer.Option(help="Listening address.")] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free port.")] = 8000,
    api_keys: Annotated[
        Path | None, typer.Option("--api-keys", metavar="FILE", help="API keys, one per line; mode 0600.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Access without a key from this machine.")] = False,
    name: Annotated[str | None, typer.Option(help="Model name in the API. Default: folder name.")] = None,
    most_waiting: Annotated[int, typer.Option(min=0, help="Longest queue; beyond it, 429.")] = 256,
    deadline: Annotated[float, typer.Option(min=0.1, help="Time limit per answer, in s.")] = 600.0,
    drain: Annotated[float, typer.Option(min=0.0, help="Grace period after SIGTERM, in s.")] = 30.0,
    max_body: Annotated[float, typer.Option(min=0.01, help="Largest request body, in MiB.")] = 4.0,
    certificate: Annotated[Path | None, typer.Option(metavar="PEM", help="TLS: the certificate.")] = None,
    certificate_key: Annotated[Path | None, typer.Option(metavar="PEM", help="TLS: its private key.")] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Origin of pages that may call this; * for all.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse unknown fields of requests.")] = False,
    stages: given.Stages = None,
    policy: opt.Policy = "balanced",
    cut: opt.CutNames = None,
    plan: given.PlanFile = None,
    slots: given.Slots = None,
    max_length: given.MaxLength = None,
    preprocess: opt.Preprocess = None,
    weights: opt.WeightsFile = None,
    pretrained: opt.Pretrained = False,
    threads: opt.Threads = 1,
    device: opt.ComputesOn = "cpu",
    runtime: opt.Runtime = "eager",
    speculate: given.Speculate = True,
    on_loss: given.OnLoss = None,
    bind: opt.Bind = None,
    cluster: Cluster = None,
) -> None:
    """Answer over HTTP: OpenAI's API, or image classification for a vision model."""
    opt.bind_to(bind, cluster)
    if open_ == (api_keys is not None):
        raise UsageError("access must be set: --api-keys FILE, or --open for all users of this machine")
    if (certificate is None) != (certificate_key is None):
        raise UsageError("TLS needs both --certificate and --certificate-key; give both, or leave both out")
    first, world, on_loss = given.join(on_loss)
    if not first:
        return
    from penstock.zoo.optional import optional_import

    for library in ("starlette", "uvicorn", "prometheus_client", "pydantic"):
        optional_import(library, "serve", UsageError)
    from penstock.recipes.texts import TextSettings
    from penstock.serve.server import check_open, check_origins, check_tls, listen_at, read_api_keys
    from penstock.serve.service import ServeSettings, serve_model

    check_origins(allow_origin or ())
    if open_:
        check_open(host)
    if certificate is not None and certificate_key is not None:
        check_tls(certificate, certificate_key)
    keys = read_api_keys(api_keys) if api_keys is not None else ()
    with listen_at(host, port) as listener:
        placed = TextSettings(
            model=model, stages=stages, policy=policy, cuts=cut or None, plan=plan, slots=slots,
            max_length=given.chat_length(max_length, plan),
            threads=threads or 1, device=device, runtime=runtime, weights=weights, pretrained=pretrained,
            on_loss=on_loss, speculate=speculate,
        )  # fmt: skip
        settings = ServeSettings(
            placed=placed, name=name, keys=keys, most_waiting=most_waiting, deadline_s=deadline, drain_s=drain,
            most_bytes=int(max_body * 2**20), certificate=certificate, certificate_key=certificate_key,
            origins=allow_origin or (), strict=strict, preprocess=preprocess,
        )  # fmt: skip
        if serve_model(settings, host, listener, world):
            raise KeyboardInterrupt
