"""Masks for the models of one thread, whatever others do."""

import threading

import torch

from penstock.generate.masks import is_causal, mask_of_rows, masks_by, sees_everything
from tests.generate.decoders import decoder, prompts


def test_another_thread_keeps_its_masks() -> None:
    other = decoder("mistral")
    ids = torch.tensor(prompts(40))
    wanted = other(ids).logits
    found: list[torch.Tensor] = []
    with masks_by(lambda _: torch.zeros(1, 1, 40, 40, dtype=torch.bool)):
        assert not torch.equal(other(ids).logits, wanted)
        thread = threading.Thread(target=lambda: found.append(other(ids).logits))
        thread.start()
        thread.join()
    assert torch.equal(found[0], wanted)
    assert torch.equal(other(ids).logits, wanted)


def test_a_mask_has_the_rows_own_positions() -> None:
    def near(_row: object, _head: object, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return (keys <= queries) & (keys > queries - 2)

    mask = mask_of_rows(near, torch.tensor([[2, 3], [0, 1]]), torch.arange(4))
    assert mask.shape == (2, 1, 2, 4)
    assert mask[:, 0].int().tolist() == [[[0, 1, 1, 0], [0, 0, 1, 1]], [[1, 0, 0, 0], [1, 1, 0, 0]]]
    assert is_causal(near)
    assert not is_causal(lambda _row, _head, queries, keys: (queries >= 0) & (keys >= 0))
    assert not sees_everything(near)
    assert sees_everything(lambda _row, _head, queries, keys: keys <= queries)
