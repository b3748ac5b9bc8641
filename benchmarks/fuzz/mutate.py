"""Damage and forge: other values in a document's places, other bytes, operators with arguments of their types."""

import copy
import json
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from penstock.graph.operators import listed_operators
from penstock.graph.ops import DTYPES, resolve_operator

_OPERATORS = sorted(listed_operators())
_NUMBERS = [0, 1, -1, 2, 7, 255, 2**16, 2**31, 2**31 - 1, -(2**31), 2**40, 2**63, 2**63 - 1, -(2**63), 2**64, 10**30,
            0.5, -0.0, 1e-300, 1e300, math.nan, math.inf, -math.inf]  # fmt: skip
_TEXTS = ["", "../../x", "/etc/passwd", "a\nb", "\x1b[2J", "\0", "n" * 10_000, "é\u202e", "batch", "x", "float32",
          "int64", "{}", "__class__", "os:system", "timm:resnet18", "-rf", "nan"]  # fmt: skip


def mutate_document(random: Random, document: Any) -> bytes:
    """Change some places of a document, and then perhaps its bytes."""
    changed = copy.deepcopy(document)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        _change(random, changed)
    data = json.dumps(changed).encode()
    return mutate_bytes(random, data) if random.random() < 0.15 else data


def mutate_bytes(random: Random, data: bytes) -> bytes:
    """Flip, cut, double or insert some bytes."""
    flipped = bytearray(data)
    for _ in range(random.choice([1, 1, 2, 8])):
        place = random.randrange(len(flipped) + 1)
        kind = random.choice(["flip", "cut", "insert", "drop", "repeat"])
        if kind == "flip" and place < len(flipped):
            flipped[place] ^= 1 << random.randrange(8)
        elif kind == "cut":
            del flipped[place:]
        elif kind == "insert":
            flipped[place:place] = random.randbytes(random.choice([1, 4, 64]))
        elif kind == "drop":
            del flipped[place : place + random.choice([1, 8, 64])]
        else:
            flipped[place:place] = flipped[max(0, place - 64) : place]
    return bytes(flipped)


def mutate_text(random: Random, text: str) -> bytes:
    """Change a line or some bytes of a file that people write."""
    lines = text.splitlines()
    place = random.randrange(len(lines))
    kind = random.choice(["bytes", "value", "swap", "drop", "twice"])
    if kind == "bytes":
        return mutate_bytes(random, text.encode())
    if kind == "value" and "=" in lines[place]:
        lines[place] = f"{lines[place].partition('=')[0]}= {json.dumps(_value(random))}"
    elif kind == "swap":
        other = random.randrange(len(lines))
        lines[place], lines[other] = lines[other], lines[place]
    elif kind == "drop":
        del lines[place]
    else:
        lines.insert(place, random.choice(lines))
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def mutate_program(random: Random, document: Any) -> bytes:
    """Change a stage program; half of the time an operation becomes a call of another listed operator."""
    if random.random() < 0.5 or not document["ops"]:
        return mutate_document(random, document)
    changed = copy.deepcopy(document)
    for _ in range(random.choice([1, 1, 2, 4])):
        place = random.randrange(len(changed["ops"]))
        known = [state["name"] for state in changed["states"]] + [value["name"] for value in changed["inputs"]]
        known += [op[0] for op in (*changed["prelude"], *changed["ops"][:place])]
        new = _call(random, known, f"new{random.randrange(10**9)}")
        if random.random() < 0.3:
            changed["ops"][place] = [changed["ops"][place][0], *new[1:]]
        else:
            changed["ops"].insert(place, new)
    if random.random() < 0.5:  # what was made comes out
        changed["outputs"][0]["name"] = random.choice([op[0] for op in changed["ops"]])
    return json.dumps(changed).encode()


def _call(random: Random, known: Sequence[str], name: str) -> list[Any]:
    target = random.choice(_OPERATORS)
    arguments = []
    keywords: dict[str, Any] = {}
    for parameter in resolve_operator(target)._schema.arguments:
        if parameter.has_default_value() and random.random() < 0.6:
            if not parameter.kwarg_only:
                break
            continue
        value = _of_type(random, str(parameter.type), parameter.name, known)
        if parameter.kwarg_only:
            keywords[parameter.name] = value
        else:
            arguments.append(value)
    return [name, target, arguments, keywords]


def _of_type(random: Random, kind: str, name: str, known: Sequence[str]) -> Any:
    """Make an argument of a schema's type: mostly one that may pass, sometimes one that is far out."""
    if random.random() < 0.03:
        return _value(random)
    if kind.startswith("Optional") and random.random() < 0.4:
        return None
    if "List" in kind:
        inner = kind.partition("[")[2]
        return [_of_type(random, inner, name, known) for _ in range(random.choice([0, 1, 1, 2, 2, 3, 4]))]
    small = random.choice([0, 1, 1, 2, 2, 3, 4, 8, -1, -2])
    makers: list[tuple[str, Callable[[], Any]]] = [
        ("Tensor", lambda: {"value": random.choice(known)}),
        ("bool", lambda: random.random() < 0.5),
        ("dtype", lambda: {"dtype": random.choice(list(DTYPES))} if name == "dtype" else small),
        ("int", lambda: random.choice(_NUMBERS[:17]) if random.random() < 0.15 else small),
        ("number", lambda: random.choice([small, small / 3, *_NUMBERS[-4:-3]])),
        ("Scalar", lambda: random.choice([small, small / 3])),
        ("float", lambda: random.choice([0.0, 0.1, 0.5, 1.0, 2.0, -1.0, 1e-12, 1e30])),
        ("str", lambda: random.choice(["constant", "reflect", "mean", "sum", "none", "fro", "ij,jk->ik", *_TEXTS[:4]])),
        ("Device", lambda: {"device": "stage"}),
    ]
    return next((make() for word, make in makers if word in kind), None)


def _change(random: Random, document: Any) -> None:
    places = _places(document)
    if not places:
        return
    holder, key = random.choice(places)
    kind = random.choice(["value", "value", "value", "swap", "drop", "add"])
    if kind == "value":
        holder[key] = _value(random)
    elif kind == "swap":
        other, place = random.choice(places)
        holder[key] = copy.deepcopy(other[place])
    elif kind == "drop":
        del holder[key]
    elif isinstance(holder, dict):
        holder[random.choice(_TEXTS)] = _value(random)
    else:
        holder.insert(key, copy.deepcopy(random.choice(holder)))


def _places(node: Any) -> list[tuple[Any, Any]]:
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    return [(node, key) for key, _ in items] + [place for _, inner in items for place in _places(inner)]


def _value(random: Random) -> Any:
    kind = random.choice(["number", "number", "number", "text", "text", "plain", "deep", "many", "dict"])
    if kind == "number":
        return random.choice(_NUMBERS)
    if kind == "text":
        return random.choice(_TEXTS)
    if kind == "deep":
        deep: Any = 1
        for _ in range(random.choice([3, 20, 60])):
            deep = [deep]
        return deep
    if kind == "many":
        return [random.choice(_NUMBERS)] * random.choice([2, 17, 2000])
    if kind == "dict":
        return {random.choice(["value", "size", "dtype", "float", "x"]): random.choice([*_TEXTS, *_NUMBERS])}
    return random.choice([None, True, False, [], {}])
