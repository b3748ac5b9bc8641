"""What processes that train together say to each other beside activations: sums of tensors, and small documents."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.transport.base import DOCUMENT_BYTES, FEEDER, Transport, receive_bytes, send_bytes
from penstock.transport.tags import DOCUMENTS


def all_reduce(transport: Transport, flat: Tensor, group: Sequence[int], tag: int) -> None:
    """Add a flat tensor up over the ranks of a group, in place; every rank gets the same bits.

    Each rank passes parts around a ring, so that nobody carries more than two times the tensor
    (Patarasuk and Yuan 2009, bandwidth-optimal all-reduce):

        0 ──▶ 1 ──▶ 2 ──▶ 0      first each part gathers its sum on its way round, then the sums go round
    """
    ranks = sorted(group)
    count, place = len(ranks), ranks.index(transport.rank)
    parts = flat.tensor_split(count)
    room = torch.empty_like(parts[0])
    left, right = ranks[place - 1], ranks[(place + 1) % count]

    def pass_on(give: Tensor, take: Tensor) -> None:
        receiving = transport.receive(_bytes(take), left, tag) if take.numel() else None
        sending = transport.send(_bytes(give), right, tag) if give.numel() else None
        for pending in (receiving, sending):
            if pending is not None:
                pending.wait()

    for step in range(count - 1):
        mine = parts[(place - step - 1) % count]
        arriving = room[: mine.numel()]
        pass_on(parts[(place - step) % count], arriving)
        mine += arriving
    for step in range(count - 1):
        pass_on(parts[(place - step + 1) % count], parts[(place - step) % count])


def all_gather(transport: Transport, document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return to every rank the documents of all ranks, in the order of ranks.

    Example:
        losses = [told["loss"] for told in all_gather(transport, {"loss": 0.5})]
    """
    if transport.size == 1:
        return [document]
    if transport.rank != FEEDER:
        send_bytes(transport, json.dumps(document).encode(), FEEDER, DOCUMENTS)
        told: list[dict[str, Any]] = json.loads(receive_bytes(transport, FEEDER, DOCUMENTS, limit=DOCUMENT_BYTES))
        return told
    told = [document]
    told += [
        json.loads(receive_bytes(transport, rank, DOCUMENTS, limit=DOCUMENT_BYTES)) for rank in range(1, transport.size)
    ]
    data = json.dumps(told).encode()
    for rank in range(1, transport.size):
        send_bytes(transport, data, rank, DOCUMENTS)
    return told


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
