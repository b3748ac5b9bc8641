"""`penstock serve`: a model in stages that answers over HTTP."""

from pathlib import Path

import msgspec

from penstock.cli import options as opt
from penstock.cli.cluster import Cluster
from penstock.cli.config import Given, settings_of, takes_config
from penstock.cli.generate import chat_length, join
from penstock.errors import UsageError
from penstock.spec.settings import ServeSettings


@takes_config(ServeSettings)
def serve(*, given: Given, cluster: Cluster = None) -> None:
    """Answer over HTTP: OpenAI's API, or image classification for a vision model."""
    settings = settings_of(ServeSettings, given)
    opt.bind_to(settings.bind, cluster)
    if settings.open == (settings.api_keys is not None):
        raise UsageError("access must be set: --api-keys FILE, or --open for all users of this machine")
    if (settings.certificate is None) != (settings.certificate_key is None):
        raise UsageError("TLS needs both --certificate and --certificate-key; give both, or neither")
    first, world, on_loss = join(settings.on_loss)
    if not first:
        return
    from penstock.zoo.optional import optional_import

    for library in ("starlette", "uvicorn", "prometheus_client", "pydantic"):
        optional_import(library, "serve", UsageError)
    from penstock.serve.server import check_open, check_origins, check_tls, listen_at, read_api_keys
    from penstock.serve.service import serve_model

    check_origins(settings.allow_origin)
    if settings.open:
        check_open(settings.host)
    if settings.certificate is not None and settings.certificate_key is not None:
        check_tls(settings.certificate, settings.certificate_key)
    keys = read_api_keys(Path(settings.api_keys)) if settings.api_keys is not None else ()
    settings = msgspec.structs.replace(settings, max_length=chat_length(settings), on_loss=on_loss)
    with listen_at(settings.host, settings.port) as listener:
        if serve_model(settings, keys, listener, world):
            raise KeyboardInterrupt
