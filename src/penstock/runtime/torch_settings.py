"""torch's global settings that change the results of operations.

A stream's job contains the driver's settings, and each process computes with them; in training all processes must have
the same settings. Flushing of denormals is set per thread, in the thread that computes.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from penstock.errors import ProgramError, UsageError
from penstock.graph.exporting import EXPORTING
from penstock.tensors import KINDS

Settings = Mapping[str, bool | str]

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_PRECISIONS = ("none", "ieee", "tf32", "bf16", "highest", "high", "medium")
_DENORMAL = 1e-40  # below the smallest normal float32


@dataclass(frozen=True, slots=True)
class _Setting:
    """Functions that read and change one setting, and its possible values; without values it is a boolean."""

    read: Callable[[], bool | str]
    change: Callable[[Any], object]
    texts: tuple[str, ...] = ()


def _backend(path: str, texts: tuple[str, ...] = ()) -> _Setting:
    """Make a setting from an attribute of `torch.backends`."""
    owner, _, name = path.rpartition(".")
    holder = attrgetter(owner)(torch.backends) if owner else torch.backends
    return _Setting(partial(getattr, holder, name), partial(setattr, holder, name), texts)


def _flushes() -> bool:
    return torch.tensor(_DENORMAL, dtype=torch.float32).mul(1).item() == 0.0


def _change_deterministic(on: bool) -> None:
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(on, warn_only=warn_only)


def _change_warn_only(on: bool) -> None:
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=on)


_CUDA = torch.backends.cuda
# A setting follows those that also change it: `float32_matmul_precision` sets the precision of each backend
_SETTINGS: Mapping[str, _Setting] = {
    "default_dtype": _Setting(
        lambda: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda name: torch.set_default_dtype(getattr(torch, name)), _DTYPES,
    ),
    "deterministic_algorithms": _Setting(torch.are_deterministic_algorithms_enabled, _change_deterministic),
    "deterministic_algorithms_warn_only": _Setting(
        torch.is_deterministic_algorithms_warn_only_enabled, _change_warn_only
    ),
    "fill_uninitialized_memory": _Setting(
        partial(getattr, torch.utils.deterministic, "fill_uninitialized_memory"),
        partial(setattr, torch.utils.deterministic, "fill_uninitialized_memory"),
    ),
    "flush_denormal": _Setting(_flushes, torch.set_flush_denormal),
    "float32_matmul_precision": _Setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, _PRECISIONS
    ),
    **{
        name: _backend(name, _PRECISIONS)
        for name in (
            "fp32_precision", "mkldnn.fp32_precision", "mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision",
            "mkldnn.rnn.fp32_precision", "cudnn.fp32_precision", "cudnn.conv.fp32_precision",
            "cudnn.rnn.fp32_precision", "cuda.matmul.fp32_precision",
        )
    },
    **{
        name: _backend(name)
        for name in (
            "mkldnn.enabled", "mkldnn.deterministic", "cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic",
            "cuda.matmul.allow_fp16_reduced_precision_reduction",
            "cuda.matmul.allow_bf16_reduced_precision_reduction", "cuda.matmul.allow_fp16_accumulation",
        )
    },
    "nnpack.enabled": _Setting(torch._C._get_nnpack_enabled, torch._C._set_nnpack_enabled),
    "flash_sdp": _Setting(_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    "mem_efficient_sdp": _Setting(_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    "math_sdp": _Setting(_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    "cudnn_sdp": _Setting(_CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
    "fp16_bf16_reduction_math_sdp": _Setting(
        _CUDA.fp16_bf16_reduction_math_sdp_allowed, _CUDA.allow_fp16_bf16_reduction_math_sdp
    ),
}  # fmt: skip


def read_settings() -> Settings:
    """Return the settings of this process and thread, by name; settings that this torch does not have are left out.

    >>> read_settings()["default_dtype"]
    'float32'
    """
    with EXPORTING:
        values = {name: _read(name) for name in _SETTINGS}
    return {name: value for name, value in values.items() if value is not None}


def _read(name: str) -> bool | str | None:
    """Return one setting; None if it cannot be read.

    `float32_matmul_precision` cannot be read after a backend's precision was set separately; that is a setting too.
    """
    try:
        value = _SETTINGS[name].read()
    except (AttributeError, RuntimeError):
        return None
    return value if isinstance(value, str) else bool(value)


def check_settings(settings: Settings) -> None:
    """Check the settings of a job; raises `ProgramError` for an invalid name or value."""
    for name, value in settings.items():
        setting = _SETTINGS.get(name)
        if setting is None or not (value in setting.texts if setting.texts else isinstance(value, bool)):
            raise ProgramError(
                f"torch has no setting {name[:80]!r} with {str(value)[:80]!r}; run the same version everywhere"
            )


@contextlib.contextmanager
def applied(settings: Settings) -> Iterator[None]:
    """Apply settings during the block, and afterwards restore those that were changed.

    Raises `UsageError` for a setting that this torch does not support, such as one of a missing GPU library.
    """
    before = read_settings()
    changes = any(before.get(name) != value for name, value in settings.items())
    try:
        change_settings(settings)
        yield
    finally:
        if changes:  # otherwise restore nothing: other code in this process may have changed settings meanwhile
            change_settings(before)


def change_settings(settings: Settings) -> None:
    """Apply settings to torch; raises `UsageError` for a setting that this torch does not support."""
    for name, setting in _SETTINGS.items():
        if name in settings and _read(name) != settings[name]:
            try:
                setting.change(settings[name])
            except (AttributeError, RuntimeError, ValueError) as error:
                raise UsageError(f"this process cannot set {name} of torch to {settings[name]}: {error}") from error


def check_unchanged(settings: Settings) -> None:
    """Check that torch has the settings of a pipeline's stages; raises `UsageError` with the differences."""
    if changed := differences(settings, read_settings()):
        raise UsageError(
            f"torch's settings have changed since the pipeline was made: {', '.join(changed)}; make a new one"
        )


def check_no_autocast(advice: str) -> None:
    """Check that the caller is not inside autocast, since other processes are not; raises `UsageError`."""
    if any(torch.is_autocast_enabled(kind) for kind in KINDS):
        raise UsageError(f"autocast is on around the call, and stages do not see it; {advice}")


def differences(settings: Settings, others: Settings) -> list[str]:
    """Return the settings in which two processes differ, with both values.

    >>> differences({"default_dtype": "float32"}, {"default_dtype": "float64"})
    ['default_dtype (float32, float64)']
    """
    names = [name for name in _SETTINGS if name in settings and name in others]
    return [f"{name} ({settings[name]}, {others[name]})" for name in names if settings[name] != others[name]]
