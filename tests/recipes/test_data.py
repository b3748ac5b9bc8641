"""Text, trees and batches of like lengths."""

from pathlib import Path
from typing import ClassVar

import pytest

from penstock.errors import DataError, UsageError
from penstock.recipes.data_formats import make_task
from penstock.recipes.data_tasks import Buckets, pad
from penstock.recipes.settings import FitSettings, make_settings
from penstock.recipes.tasks import RowDataset, keep_some, spread
from penstock.zoo.data.texts import CLS, PAD, is_trees, read_trees, train_tokenizer

TREES = """(3 (2 It) (4 (2 's) (4 lovely)))
(2 (2 No) (2 one))
(0 (1 (2 -LRB-) (1 bad)) (2 -RRB-))
"""
BERT = "hf:bert,vocab_size=300,hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"
GPT2 = "hf:gpt2,vocab_size=300,n_embd=16,n_layer=1,n_head=2,n_positions=16,bos_token_id=0,eos_token_id=0"


def test_trees_of_sentiment_are_read(tmp_path: Path) -> None:
    file = tmp_path / "train.txt"
    file.write_text(TREES)
    assert is_trees(file)
    found = read_trees(file)
    assert (found.texts, found.labels) == (["It 's lovely", "( bad )"], [1, 0])
    file.write_text(TREES + "no tree\n")
    with pytest.raises(DataError, match=r"line 4 of .* is no tree"):
        read_trees(file)
    file.write_text("Speak, speak.")
    assert not is_trees(file)


def test_a_tokenizer_takes_any_text() -> None:
    tokenizer = train_tokenizer(["to be or not to be"] * 3, 300)
    assert tokenizer.decode(tokenizer.encode("not ünknown").ids) == "not ünknown"
    assert (tokenizer.token_to_id(PAD), tokenizer.token_to_id(CLS)) == (0, 1)
    with pytest.raises(DataError, match="at least 258 tokens; got 100"):
        train_tokenizer(["a"], 100)


class _Lengths:
    lengths: ClassVar = [int(length) for length in "3719264518273645192837465"]


def test_buckets_hold_like_lengths_and_every_row_once() -> None:
    buckets = Buckets(_Lengths(), 4, shuffle=True)
    first = list(buckets)
    assert sorted(row for batch in first for row in batch) == list(range(25))
    assert list(buckets) == first
    assert len(first) == len(buckets) == 7
    spreads = [max(ls) - min(ls) for batch in first for ls in [[_Lengths.lengths[row] for row in batch]]]
    assert max(spreads) <= 3
    assert len(first[-1]) == 1
    buckets.set_epoch(1)
    assert list(buckets) != first


def test_padding_is_masked() -> None:
    inputs, labels = pad([([5, 6, 7], 1), ([8], 0)])
    assert inputs["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert labels.tolist() == [1, 0]


def test_rows_kept_for_validation_are_not_learned_from() -> None:
    learned, kept = keep_some(30)
    assert sorted([*learned, *kept]) == list(range(30))
    assert len(kept) == 3
    assert list(spread(10, 4)) == [0, 2, 5, 7]
    with pytest.raises(DataError, match=r"got only 9 rows; .*--validation"):
        keep_some(9)


def test_a_text_is_cut_into_rows(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    task = make_task(FitSettings(model=GPT2, data=str(file), length=8))
    assert task.unit == "tokens"
    assert isinstance(task.training, RowDataset)
    (inputs, labels) = task.training[0]
    assert inputs["input_ids"].tolist() == labels.tolist()
    assert len(labels) == 8
    with pytest.raises(UsageError, match="at most 16 tokens, not 17; lower it"):
        make_task(FitSettings(model=GPT2, data=str(file), length=17))
    file.write_text("short")
    with pytest.raises(DataError, match="a row needs 8; lower it"):
        make_task(FitSettings(model=GPT2, data=str(file), length=8))


def test_model_and_data_must_go_together(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(TREES)
    with pytest.raises(UsageError, match="does not take text, but the data is text"):
        make_task(FitSettings(model="timm:vit_tiny_patch16_224,depth=1", data=str(tmp_path)))
    with pytest.raises(UsageError, match="gpt2 returned no transform of images"):
        make_task(FitSettings(model="tests.models:gpt2", data="digits"))


def test_invalid_settings_name_their_field() -> None:
    with pytest.raises(UsageError, match=r"Expected `int` >= 1 - at `\$.batch_size`"):
        make_settings({"model": "m", "data": "d", "batch_size": 0})
    with pytest.raises(UsageError, match="unknown field `batchsize`"):
        make_settings({"model": "m", "data": "d", "batchsize": 4})
