"""Labels of operators whose results mix elements: positions, products, attention, convolutions; see `row_rules`."""

import torch
from torch import Tensor

from penstock.graph.row_labels import (
    Labelled,
    OperatorCall,
    are_rows,
    flat,
    fold,
    join,
    no_label,
    over,
    per_row,
    place_label,
    read_all,
    total,
    varies,
)


def into_place(reading: OperatorCall) -> Tensor:
    """Return the labels of select_scatter and slice_scatter, which write to a part of a dimension."""
    written = join(no_label(), *reading.tensors())
    return join(written, place_label()) if varies(reading.first(), reading.named["dim"]) else written


def _pick(labels: Tensor, dim: int, index: Labelled) -> tuple[Tensor, Tensor, Tensor]:
    """Return the reads of an index along a dimension: labels, a known index into them, and the index's own labels.

    An index that depends on data may read any entry of the dimension. A constant index that differs by row selects
    rows, if the entries are rows.
    """
    if index.value is not None and (are_rows(labels, dim) or not index.labels.any()):
        return labels, index.value, no_label().expand(index.labels.shape)
    return fold(labels, [dim]).expand_as(labels), torch.zeros(index.labels.shape, dtype=torch.int64), index.labels


def read_index(reading: OperatorCall) -> Tensor:
    """Return the labels of indexing by tensors, which may be constants or depend on data."""
    labels, own = reading.first(), []
    indices: list[Tensor | None] = []
    places = [dim for dim, index in enumerate(reading.named["indices"]) if index is not None]
    for dim, index in enumerate(reading.named["indices"]):
        if index is None:
            indices.append(None)
            continue
        if index.value is not None and index.value.dtype in (torch.bool, torch.uint8):
            return read_all(reading)
        labels, known, label = _pick(labels, dim, index)
        indices.append(known)
        own.append(label)
    read = torch.ops.aten.index.Tensor(labels, indices)
    together = places == list(range(places[0], places[-1] + 1))
    after = labels.dim() - places[-1] - 1 if together else labels.dim() - len(places)
    joined = join(*own)
    return join(read, joined.reshape(*joined.shape, *[1] * after))


def read_selected(reading: OperatorCall) -> Tensor:
    """Return the labels of index_select."""
    labels, dim, index = reading.first(), reading.named["dim"], reading.named["index"]
    labels, known, own = _pick(labels, dim, index)
    read = labels.index_select(dim, known)
    return join(read, own.reshape(-1, *[1] * (labels.dim() - dim % labels.dim() - 1)))


def gather(reading: OperatorCall) -> Tensor:
    """Return the labels of gather, which reads anywhere along its dimension."""
    labels, dim, index = (
        reading.first(),
        reading.named["dim"],
        flat(reading.named.get("index", reading.named.get("indices")))[0],
    )
    if dim is None or labels.dim() == 0:
        return read_all(reading)
    if index.value is not None and index.value.shape == reading.shape and are_rows(labels, dim):
        return labels.gather(dim, index.value)
    folded = fold(labels, [dim])
    for other in range(labels.dim()):
        if other != dim % labels.dim() and folded.shape[other] > index.labels.shape[other] > 0:
            folded = folded.narrow(other, 0, index.labels.shape[other])
    return join(folded, index.labels)


def embedding(reading: OperatorCall) -> Tensor:
    """Return the labels of rows of an embedding table."""
    weight, indices = reading.named["weight"].labels, reading.named["indices"].labels
    return join(indices.unsqueeze(-1), total(weight))


def scatter(reading: OperatorCall) -> Tensor:
    """Return the labels of scatter, which may write anywhere along its dimension."""
    labels, dim, index = reading.first(), reading.named["dim"], reading.named["index"].labels
    written = [
        fold(each.labels, [dim]) for name in ("src", "source", "value") for each in flat(reading.named.get(name))
    ]
    if index.dim() == labels.dim() > 0 and not varies(labels, dim):
        rows = fold(index, [dim])
        fits = all(
            a == b
            for place, (a, b) in enumerate(zip(rows.shape, labels.shape, strict=True))
            if place != dim % labels.dim()
        )
        if fits and all(each.dim() in (0, labels.dim()) for each in written):
            written = [each if each.dim() == 0 or each.shape == rows.shape else total(each) for each in written]
            return join(labels, rows, *written)
    return join(labels, total(*reading.tensors()[1:]), place_label())


def into_dim(reading: OperatorCall) -> Tensor:
    """Return the labels of index_add and similar operators, which write at an index into a dimension."""
    labels, dim, index = reading.first(), reading.named["dim"], reading.named["index"].labels
    written = [fold(each.labels, [dim]) for name in ("source", "value") for each in flat(reading.named.get(name))]
    return join(labels, total(index), *written, *([place_label()] if varies(labels, dim) else []))


def put_index(reading: OperatorCall) -> Tensor:
    """Return the labels of index_put, with constant indices or indices row by row."""
    labels, indices, values = reading.first(), reading.named["indices"], reading.named["values"].labels
    known = [None if index is None else index.value for index in indices]
    if all(index is None or (index.value is not None and not index.labels.any()) for index in indices):
        if any(index is not None and varies(labels, dim) for dim, index in enumerate(indices)):
            return join(labels, values, place_label())
        put: Tensor = torch.ops.aten.index_put.default(labels, known, values)
        return join(labels, put) if reading.named.get("accumulate") else put
    first = indices[0]
    if first is not None and first.value is not None and first.value.tolist() == list(range(labels.shape[0])):
        # row by row: each index after the first has one entry per row, or the same entries for each row
        parts = [values, *(index.labels for index in indices[1:] if index is not None)]
        rows = [per_row(x, labels.dim()) if x.dim() and x.shape[0] == len(first.value) else total(x) for x in parts]
        return join(labels, *rows)
    return join(labels, total(*reading.tensors()[1:]))


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
        *(fold(each, [0, 2]) for each in hidden),
        total(*(each.labels for each in flat(reading.named["params"]))),
    )
    return [rows.transpose(0, 1) if place == 0 else rows, *[rows] * len(hidden)]
