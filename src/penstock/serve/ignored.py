"""Fields of a request that the server does not know: named to the client and in the log, or refused."""

import re
from collections.abc import Iterator
from itertools import islice

import pydantic

from penstock.serve.protocol import ApiError
from penstock.terminal.notes import note

IGNORED = "Penstock-Ignored-Fields"
_MOST_SHOWN, _LONGEST = 16, 100  # of names in a header or a line of the log
_MOST_LOGGED = 1000
_MOST_READ = 10_000  # of unknown fields, which may all have one name


class IgnoredFields:
    """Names unknown fields in a response header, and once per client in the log; with `strict` refuses them.

    Example:
        ignored.check(body, client)
        JSONResponse(answer, headers=ignored.headers(body))
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._logged: set[tuple[str, str]] = set()

    def check(self, body: pydantic.BaseModel, client: str) -> None:
        """Log a client's unknown fields; raises `ApiError` for the first one if the server is strict."""
        names = _names(body)
        if names and self._strict:
            raise ApiError(f"{names[0]} is not a supported field; leave it out", param=re.split(r"[.\[]", names[0])[0])
        new = [name for name in names if (client, name) not in self._logged]
        if new and len(self._logged) < _MOST_LOGGED:  # a client can invent any number of names
            self._logged.update((client, name) for name in new)
            note(f"ignored fields of {client.rpartition('@')[2]}: {', '.join(new)}")

    def headers(self, body: pydantic.BaseModel) -> dict[str, str]:
        """Return the response header that names unknown fields."""
        names = _names(body)
        return {IGNORED: ", ".join(names)} if names else {}


def _names(body: pydantic.BaseModel) -> list[str]:
    """Return the first unknown fields, with indices left out, as printable ASCII."""
    names = (re.sub(r"\[\d+\]", "[]", name[:_LONGEST]) for name in islice(_unknown_fields(body), _MOST_READ))
    # a header may neither begin nor end with a space
    found = dict.fromkeys(ascii(name.strip())[1:-1] or "''" for name in names)
    return list(found)[:_MOST_SHOWN]


def _unknown_fields(body: pydantic.BaseModel, place: str = "") -> Iterator[str]:
    """Yield the paths of a body's fields that the server does not know."""
    for name in body.model_extra or ():
        yield f"{place}{name}"
    for name in type(body).model_fields:
        value = getattr(body, name)
        if isinstance(value, pydantic.BaseModel):
            yield from _unknown_fields(value, f"{place}{name}.")
        for index, each in enumerate(value) if isinstance(value, list) else ():
            if isinstance(each, pydantic.BaseModel):
                yield from _unknown_fields(each, f"{place}{name}[{index}].")
