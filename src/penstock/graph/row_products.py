"""Labels of matrix products, attention, convolutions and recurrent layers: see `row_rules`."""

from torch import Tensor

from penstock.graph.row_labels import OperatorCall, flat, fold, join, no_label, over, per_row, read_all, total

_FURTHER = "0123456789"  # letters for the dimensions of an ellipsis


def convolution(reading: OperatorCall) -> Tensor:
    """Return the labels of a convolution, which computes each entry of the batch independently."""
    labels, weight = reading.tensors()[:2]
    if labels.dim() != weight.dim():  # no batch dimension
        return read_all(reading)
    return join(per_row(labels, len(reading.shape)), reading.others())


def attention(reading: OperatorCall) -> Tensor:
    """Return the labels of attention: each query reads all keys and values."""
    query, key, value = (reading.named[name].labels for name in ("query", "key", "value"))
    mask = reading.named.get("attn_mask")
    grouped = (-3,) if reading.named.get("enable_gqa") else ()
    parts = [fold(query, [-1]), *(fold(each, [-1, -2, *grouped]) for each in (key, value))]
    return join(*parts, *([fold(mask.labels, [-1])] if mask is not None else []))


def _matmul(first: Tensor, second: Tensor) -> Tensor:
    rows = fold(first, [-1])
    columns = fold(second, [-2]) if second.dim() > 1 else fold(second, [0]).reshape(1, 1)
    joined = join(rows if rows.dim() > 1 else rows.reshape(1, 1), columns)
    if second.dim() == 1:
        joined = joined.squeeze(-1)
    return joined.squeeze(-1 if second.dim() == 1 else -2) if first.dim() == 1 else joined


def linear(reading: OperatorCall) -> Tensor:
    """Return the labels of a linear layer."""
    labels, weight, *bias = reading.tensors()
    return join(fold(labels, [-1]), *([fold(weight, [-1]).squeeze(-1)] if weight.dim() > 1 else [total(weight)]), *bias)


def product(reading: OperatorCall) -> Tensor:
    """Return the labels of a matrix or vector product."""
    return _matmul(*reading.tensors()[:2])


def added_product(reading: OperatorCall) -> Tensor:
    """Return the labels of a product that is added to a tensor."""
    added, *factors = reading.tensors()[:3]
    return join(added, _matmul(*factors))


def outer(reading: OperatorCall) -> Tensor:
    """Return the labels of an outer product."""
    first, second = reading.tensors()[:2]
    return join(first[..., :, None], second[..., None, :])


def inner(reading: OperatorCall) -> Tensor:
    """Return the labels of an inner product."""
    first, second = reading.tensors()[:2]
    return _matmul(first, second.mT if second.dim() > 1 else second) if second.dim() < 3 else read_all(reading)


def tensordot(reading: OperatorCall) -> Tensor:
    """Return the labels of a product over several dimensions."""
    first, second = reading.tensors()[:2]
    dims, other = (
        [dim % x.dim() for dim in reading.named[key]] for x, key in ((first, "dims_self"), (second, "dims_other"))
    )
    first, second = over(first, dims, first.dim() - len(dims)), over(second, other, second.dim() - len(other))
    return join(first.reshape(*first.shape, *[1] * second.dim()), second)


def einsum(reading: OperatorCall) -> Tensor:
    """Return the labels of an einsum."""
    given, arrow, made = reading.named["equation"].replace(" ", "").partition("->")
    terms = list(zip(given.split(","), reading.tensors(), strict=True))
    # an ellipsis stands for as many letters as the operand has further dimensions, counted from the right
    spread = [
        (term.replace("...", _FURTHER[len(_FURTHER) + len(term) - 3 - x.dim() :]), x)
        for term, x in terms
        if "..." in term
    ]
    longest = max((term for term, _ in spread), key=len, default="")
    made = made.replace("...", "".join(letter for letter in longest if letter in _FURTHER))
    terms = [*spread, *((term, x) for term, x in terms if "..." not in term)]
    if not arrow or any(len(set(term)) != len(term) for term, _ in terms):
        return read_all(reading)
    parts = []
    for term, labels in terms:
        kept = [letter for letter in made if letter in term]
        labels = over(labels, [i for i, letter in enumerate(term) if letter not in made], len(kept))
        labels = labels.permute([[x for x in term if x in made].index(letter) for letter in kept])
        parts.append(labels[tuple(slice(None) if letter in term else None for letter in made)])
    return join(no_label(), *parts)


def distances(reading: OperatorCall) -> Tensor:
    """Return the labels of pairwise distances."""
    first, second = (fold(each, [-1]) for each in reading.tensors()[:2])
    return join(first, second.mT)


def recurrent(reading: OperatorCall) -> list[Tensor]:
    """Return the labels of the output of RNN, GRU and LSTM, and of the states of each layer."""
    hidden = [each.labels for each in flat(reading.named["hx"])]
    labels = reading.named["input"].labels
    if labels.dim() != 3:
        return [read_all(reading)] * (1 + len(hidden))
    place = 0 if reading.named["batch_first"] else 1
    rows = join(
        fold(labels, [dim for dim in range(3) if dim != place]).reshape(1, -1, 1),
        *(fold(each, [0, 2]) for each in hidden), total(*(each.labels for each in flat(reading.named["params"]))),
    )  # fmt: skip
    return [rows.transpose(0, 1) if place == 0 else rows, *[rows] * len(hidden)]
