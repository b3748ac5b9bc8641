"""Files that claim more than they hold, or are nested, long or no files: refused before anything is built or read."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file

from penstock.errors import DataError, ModelError, PenstockError
from penstock.plan.schedule.custom import read_schedule
from penstock.recipes.data_formats import make_task
from penstock.recipes.settings import FitSettings, read_settings
from penstock.spec.cluster import read_cluster
from penstock.spec.profile import read_profile
from penstock.tracing.trace import read_run
from penstock.zoo.data.image_names import open_images
from penstock.zoo.data.texts import read_tokenizer
from penstock.zoo.models.gguf_models import load_gguf, load_gguf_tokenizer
from penstock.zoo.models.models import load_model
from penstock.zoo.weights.convert import convert_checkpoint
from penstock.zoo.weights.weight_files import FileWeights

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("claim", "value"), [("block_count", 10**9), ("embedding_length", 10**9), ("feed_forward_length", 10**9)]
)
@pytest.mark.parametrize("load", [load_gguf, load_gguf_tokenizer])
def test_a_gguf_file_claims_more_than_its_tensors(
    claim: str, value: int, load: Callable[[str], Any], tmp_path: Path
) -> None:
    file = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_uint32(f"llama.{claim}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=rf"{claim} {value}"):
        load(f"gguf:{file}")


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 10**9}, {"num_hidden_layers": 1e9}, {"num_hidden_layers": 600},
        {"text_config": {"num_hidden_layers": 10**9}}, {"num_local_experts": 10**9},
    ],
)  # fmt: skip
def test_a_configuration_claims_more_layers_than_the_weights_have_tensors(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **small, **fields}))
    save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"at most (512|10000)"):
        load_model(f"hf:{tmp_path}")


def test_a_type_of_model_of_too_many_layers() -> None:
    with pytest.raises(ModelError, match="n_layer of gpt2 is 1000000000"):
        load_model("hf:gpt2,n_layer=1000000000")


@pytest.mark.parametrize(
    "text", [DEEP, "9" * 5000, f'{{"weight_map": {DEEP}}}', "\0" * 100], ids=["deep", "digits", "map", "zeros"]
)
def test_nested_and_long_documents(text: str, tmp_path: Path) -> None:
    file, folder = tmp_path / "m.safetensors.index.json", tmp_path / "run"
    folder.mkdir()
    for each in (file, folder / "run.json"):
        each.write_text(text)
    toml = tmp_path / "a.toml"
    toml.write_text("a = " + text)
    readers: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (FileWeights, (file,)), (read_profile, (file,)), (read_settings, (file,)), (read_schedule, (text,)),
        (read_run, (folder,)), (read_cluster, (toml,)), (read_tokenizer, (file,)),
    ]  # fmt: skip
    for read, given in readers:
        with pytest.raises(PenstockError) as found:
            read(*given)
        assert len(str(found.value)) < 1000, read


def test_named_pipe_is_refused_as_file(tmp_path: Path) -> None:
    (tmp_path / "im").mkdir()
    for name in ("m.safetensors", "m.pth", "im/a.png", "a.png", "a.tar", "a.zip", "a.txt", "a.bin"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "m.safetensors.index.json").write_text('{"weight_map": {"x": "m.safetensors"}}')
    for name in ("m.safetensors", "m.safetensors.index.json", "m.pth"):
        with pytest.raises(ModelError, match="pipe"):
            FileWeights(tmp_path / name)
    with pytest.raises(ModelError, match="pipe"):
        convert_checkpoint(tmp_path / "m.pth", tmp_path / "out.safetensors")
    with pytest.raises(DataError, match="pipe"):
        open_images(tmp_path / "im").read(0)
    for name in ("a.png", "a.tar", "a.zip", "a.txt", "a.bin"):
        with pytest.raises(DataError, match="pipe"):
            open_images(tmp_path / name)
        with pytest.raises(DataError, match="pipe"):
            make_task(FitSettings(model="timm:vit_tiny_patch16_224", data=str(tmp_path / name)))


def test_a_sparse_image_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(20 * 2**30)
    for path in (tmp_path, tmp_path / "a.png"):
        with pytest.raises(DataError, match=r"21\.5 GB"):
            open_images(path).read(0)


def test_tokenizer_panic_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As pyo3 makes one; which expressions panic depends on the version."""

    def panics(*_given: object, **_options: object) -> None:
        raise PanicException("called `Result::unwrap()` on an `Err` value")

    import tokenizers
    import transformers

    from penstock.zoo.models.language import load_tokenizer

    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.setattr(tokenizers, "Tokenizer", type("Tokenizer", (), {"from_file": panics}))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", panics)
    with pytest.raises(DataError, match="unwrap"):
        read_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(ModelError, match="unwrap"):
        load_tokenizer(f"hf:{tmp_path}")


def test_the_header_is_not_read_again_for_each_tensor(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    dtypes = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn, torch.complex64]
    tensors = {f"{index}": torch.ones(index % 4, 3).to(dtypes[index % 6]) for index in range(50)}
    tensors["scalar"] = torch.tensor(2.5)
    save_file(tensors, file)
    weights = FileWeights(file)
    weights.load("scalar")
    with file.open("r+b") as damaged:
        damaged.write(bytes(64))
    for name, tensor in tensors.items():
        loaded = weights.load(name)
        assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
        assert loaded.tolist() == tensor.tolist()
        loaded.zero_()  # a private mapping
    assert weights.load("scalar").item() == 2.5
