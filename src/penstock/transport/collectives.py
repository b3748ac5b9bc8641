"""Collectives for training: sums of tensors, and exchange of small objects as JSON documents."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.transport.base import DOCUMENT_BYTES, DOCUMENTS, ArrivingBytes, Transport, post_bytes


def all_reduce(transport: Transport, flat: Tensor, group: Sequence[int], tag: int, *, at_once: bool = False) -> None:
    """Sum a flat tensor over the ranks of a group, in place; every rank gets the same bits.

    Example:
        all_reduce(transport, torch.cat([gradient.reshape(-1) for gradient in gradients]), [0, 2], tag)

    By default parts are sent around a ring, so that no rank sends more than twice the tensor's bytes (Patarasuk and
    Yuan 2009, bandwidth-optimal all-reduce):

        0 ──▶ 1 ──▶ 2 ──▶ 0      first the parts are reduced around the ring, then the sums are gathered

    This takes 2 (n - 1) sequential messages. With `at_once` each rank sends the whole tensor to every other rank in one
    step, which is faster for small tensors.
    """
    ranks = sorted(group)
    if at_once:
        _sum_at_once(transport, flat, ranks, tag)
    else:
        _sum_around(transport, flat, ranks, tag)


def _sum_at_once(transport: Transport, flat: Tensor, ranks: Sequence[int], tag: int) -> None:
    """Exchange whole tensors, and sum them in the order of ranks."""
    if not flat.numel():
        return
    others = [rank for rank in ranks if rank != transport.rank]
    given = {rank: torch.empty_like(flat) for rank in others}
    receives = [transport.receive(_bytes(given[rank]), rank, tag) for rank in others]
    sends = [transport.send(_bytes(flat), rank, tag) for rank in others]
    for pending in (*receives, *sends):
        pending.wait()
    given[transport.rank] = flat
    total = given[ranks[0]].clone()
    for rank in ranks[1:]:
        total += given[rank]
    flat.copy_(total)


def _sum_around(transport: Transport, flat: Tensor, ranks: Sequence[int], tag: int) -> None:
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
    """Return the objects of all ranks on every rank, in the order of ranks, as `all_gather_object` does.

    Example:
        losses = [told["loss"] for told in all_gather(transport, {"loss": 0.5})]

    Every rank sends its object as JSON to all other ranks at the same time; a small object takes one message.
    """
    if transport.size == 1:
        return [document]
    data = json.dumps(document).encode()
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    arriving = {rank: ArrivingBytes(transport, rank, DOCUMENTS, limit=DOCUMENT_BYTES) for rank in others}
    sends = [post_bytes(transport, data, rank, DOCUMENTS) for rank in others]
    found = {rank: json.loads(each.wait()) for rank, each in arriving.items()}
    for pending in sends:
        pending.wait()
    found[transport.rank] = document
    return [found[rank] for rank in range(transport.size)]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
