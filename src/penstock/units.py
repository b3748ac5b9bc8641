"""Bytes and seconds: how they are written for people and read back."""

import re

from penstock.errors import UsageError

_BYTE_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_PREFIXES = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def format_bytes(num_bytes: float) -> str:
    """Write a number of bytes with three significant digits.

    >>> format_bytes(605184)
    '605 kB'
    """
    return _scaled(num_bytes, "B")


def write_bytes(num_bytes: int) -> str:
    """Format a number of bytes exactly, in the largest possible binary unit; `parse_bytes` reads it.

    >>> write_bytes(4 * 2**30), write_bytes(1000)
    ('4 GiB', '1000 B')
    """
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes and num_bytes % 2**power == 0:
            return f"{num_bytes // 2**power} {unit}"
    return f"{num_bytes} B"


def format_rate(bytes_per_s: float) -> str:
    """Write a bandwidth in bits per second, the usual unit of networks.

    >>> format_rate(125_000_000)
    '1 Gbit/s'
    """
    return _scaled(bytes_per_s * 8, "bit/s")


def format_seconds(seconds: float) -> str:
    """Write a duration with a unit that suits its size.

    >>> format_seconds(0.0042)
    '4.2 ms'
    """
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.2g} µs"


def parse_bytes(text: str) -> int:
    """Read a size such as `512 MiB`, `2GB` or `4096`.

    Raises `UsageError` when the text is not a positive number with a known unit.

    >>> parse_bytes("1 GiB")
    1073741824
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    prefixes = _BYTE_PREFIXES | _BINARY_PREFIXES
    if match is None or match[2] not in prefixes:
        raise UsageError(f"a size must be a number and a unit; got {text!r}; write it like 512MiB or 2GB")
    num_bytes = round(float(match[1]) * prefixes[match[2]])
    if num_bytes <= 0:
        raise UsageError(f"a size must be positive; got {text!r}; write it like 512MiB or 2GB")
    return num_bytes


def parse_rate(text: str) -> float:
    """Read a bandwidth such as `100 Mbit/s` or `1Gbit`; the result is bytes per second.

    Raises `UsageError` when the text is not a positive number of bits per second.

    >>> parse_rate("1 Gbit/s")
    125000000.0
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)bit(?:/s|ps)?\s*", text.lower())
    if match is None or float(match[1]) <= 0:
        raise UsageError(
            f"a bandwidth must be a positive number of bits per second; got {text!r}; write it like 100Mbit/s"
        )
    return float(match[1]) * _BYTE_PREFIXES[match[2]] / 8


def parse_seconds(text: str) -> float:
    """Read a duration such as `0.2 ms`, `50us` or `1 s`.

    Raises `UsageError` when the text is not a number with a unit of time.

    >>> parse_seconds("250 ms")
    0.25
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|ms|us|µs)\s*", text.lower())
    if match is None:
        raise UsageError(f"a duration must be a number and a unit; got {text!r}; write it like 0.2 ms")
    return float(match[1]) / {"s": 1, "ms": 10**3, "us": 10**6, "µs": 10**6}[match[2]]


def _scaled(value: float, unit: str) -> str:
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999.5 of a unit would round to 1e+03 of it: move to the next prefix first
        if abs(value) >= factor * 0.9995:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
