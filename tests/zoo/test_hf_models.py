"""Models of transformers, and their checkpoints read as `from_pretrained` reads them."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from penstock.errors import ModelError
from penstock.zoo.models.hf_models import hf_config
from penstock.zoo.models.language import load_generation_config
from penstock.zoo.models.models import load_model

transformers = pytest.importorskip("transformers")

LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64,
}  # fmt: skip
BERT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
VIT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 64}
SMALL = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "bert": ("BertForSequenceClassification", BERT),
    "t5": ("T5ForConditionalGeneration", T5),
    "llama": ("LlamaForCausalLM", LLAMA),
    "mixtral": ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 3}),
    "vit": ("ViTForImageClassification", VIT),
}


def save(kind: str, folder: Path, **options: Any) -> Any:
    architecture, fields = SMALL[kind]
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**fields, **options)
    module = getattr(transformers, architecture)(config).eval()
    module.save_pretrained(folder)
    return module


def output(module: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = module(**kwargs).logits
    return logits


@pytest.mark.parametrize("kind", sorted(SMALL))
def test_a_saved_model_gives_the_outputs_of_from_pretrained(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path)
    reference = getattr(transformers, SMALL[kind][0]).from_pretrained(tmp_path).eval()
    parts = load_model(f"hf:{tmp_path}")
    assert type(parts.module) is type(reference)
    assert {parameter.device.type for parameter in parts.module.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in parts.module.buffers()} <= {"cpu"}
    for name, parameter in reference.named_parameters(remove_duplicate=False):
        assert torch.equal(parts.weights.load(name), parameter), name
    whole = load_model(f"hf:{tmp_path}", whole=True)
    assert torch.equal(output(whole.module, whole.example_kwargs), output(reference, whole.example_kwargs))


def test_tied_parameters_stay_tied_in_a_whole_model(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    module: Any = load_model(f"hf:{tmp_path}", whole=True).module
    assert module.lm_head.weight is module.transformer.wte.weight
    random: Any = load_model("hf:t5,num_layers=1,d_model=16,d_ff=16,vocab_size=9", whole=True).module
    assert random.encoder.embed_tokens.weight is random.shared.weight
    assert random.lm_head.weight is random.shared.weight


def test_legacy_names_and_a_missing_prefix_are_mapped(tmp_path: Path) -> None:
    reference = save("bert", tmp_path)
    file = tmp_path / "model.safetensors"
    legacy = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    state = {}
    for key, value in load_file(file).items():
        for new, old in legacy.items():
            key = key.replace(new, old)
        state[key.removeprefix("bert.")] = value
    assert any("gamma" in key for key in state)
    file.unlink()
    save_file(state, tmp_path / "old.safetensors")
    model = load_model(f"hf:{tmp_path}", whole=True)
    assert torch.equal(output(model.module, model.example_kwargs), output(reference, model.example_kwargs))


def test_shards_are_read(tmp_path: Path) -> None:
    reference = save("gpt2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    weights = load_model(f"hf:{tmp_path}").weights
    assert torch.equal(weights.load("lm_head.weight"), reference.lm_head.weight)


def test_a_model_type_gives_its_default_configuration() -> None:
    model = load_model("hf:gpt2,n_layer=2")
    assert type(model.module).__name__ == "GPT2LMHeadModel"
    assert model.weights.shape("lm_head.weight") == (50257, 768)
    assert {name: tuple(value.shape) for name, value in model.example_kwargs.items()} == {
        "input_ids": (2, 128),
        "attention_mask": (2, 128),
    }
    assert (model.task, model.example_args, model.transform, model.class_names) == ("text", (), None, None)
    config: Any = model.module.config
    assert (config.n_layer, config.use_cache, config._attn_implementation) == (2, False, "sdpa")


def test_each_type_gets_a_fitting_head() -> None:
    heads = {
        name: type(load_model(f"hf:{name},{layers}=1").module).__name__
        for name, layers in (("bert", "num_hidden_layers"), ("t5", "num_layers"), ("vit", "num_hidden_layers"))
    }
    assert heads == {"bert": "BertForMaskedLM", "t5": "T5ForConditionalGeneration", "vit": "ViTForImageClassification"}


def test_images_have_a_transform_and_class_names(tmp_path: Path) -> None:
    save("vit", tmp_path, id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1})
    model = load_model(f"hf:{tmp_path}")
    assert (model.task, model.class_names) == ("image", ("cat", "dog"))
    assert model.example_kwargs["pixel_values"].shape == (2, 3, 32, 32)
    assert model.transform is not None
    assert model.transform(Image.new("RGB", (50, 40))).shape == (3, 32, 32)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 24}})
    )
    transform = load_model(f"hf:{tmp_path}").transform
    assert transform is not None
    assert transform(Image.new("RGB", (50, 40))).shape == (3, 16, 24)


@pytest.mark.parametrize("file", ["preprocessor_config.json", "config.json"])
def test_code_in_a_models_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    save("vit", tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    path = tmp_path / file
    settings = json.loads(path.read_text()) if path.exists() else {}
    settings.pop("model_type", None)
    names = {"AutoImageProcessor": "own.Own", "AutoConfig": "own.Own"}
    path.write_text(json.dumps(settings | {"image_processor_type": "Own", "auto_map": names}))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))  # what a person would answer
    with pytest.raises(ModelError, match=file.split(".")[0] if "pre" in file else "configuration"):
        load_model(f"hf:{tmp_path}")
    assert not ran.exists()


@pytest.mark.parametrize("kind", ["deit", "convnext", "clip"])
def test_default_transforms_give_the_models_size(kind: str) -> None:
    transform = load_model(f"hf:{kind}").transform
    assert transform is not None
    assert transform(Image.new("RGB", (300, 240))).shape == (3, 224, 224)


def test_parameters_are_float32_unless_asked_for(tmp_path: Path) -> None:
    save("gpt2", tmp_path, dtype=torch.bfloat16)
    assert load_model(f"hf:{tmp_path}").weights.load("lm_head.weight").dtype == torch.float32


def test_a_head_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    save("vit", tmp_path)
    with pytest.raises(ModelError, match=r"classifier\.weight \(float32\[2, 32\] in the weights, float32\[5, 32\]"):
        load_model(f"hf:{tmp_path},num_labels=5")


def test_a_pickled_checkpoint_is_to_be_converted(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="convert it first: penstock convert"):
        load_model(f"hf:{tmp_path}")


def test_a_configuration_alone_gives_random_weights(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert load_model(f"hf:{tmp_path}").weights.shape("lm_head.weight") == (50, 32)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:gpt2,n_layr=2", r"^n_layr not found in the configuration of gpt2; did you mean n_layer"),
        ("hf:./none", r"^directory \./none not found; check the path$"),
        ("hf:gpt2,n_layer=many", r"^hf:gpt2 cannot have \{'n_layer': 'many'\}|^transformers cannot build hf:gpt2"),
    ],
)
def test_wrong_names_and_options_are_one_line(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_model(name)
    assert "\n" not in str(caught.value)


def test_a_directory_needs_a_readable_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json not found .*save_pretrained"):
        load_model(f"hf:{tmp_path}")
    for text in ("{", "{}", '{"model_type": "nosuchmodel"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match="transformers cannot read the configuration of"):
            load_model(f"hf:{tmp_path}")


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("name", "pretrained", "advice"),
    [
        ("hf:gpt2", True, "give --weights FILE.safetensors or leave --pretrained out"),
        ("hf:someone/gpt2-xl", True, "give --weights FILE.safetensors or leave --pretrained out"),
        ("hf:gpt22", False, "or a model type such as hf:gpt2; did you mean gpt2"),
        ("timm:vit_tiny_patch16_224", True, "give --weights FILE.safetensors or leave --pretrained out"),
    ],
)
def test_no_network_is_one_line(name: str, pretrained: bool, advice: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(name, pretrained=pretrained)
    assert str(caught.value).startswith(f"the files of {name} cannot be downloaded (")
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_fetched_model_is_used(tmp_path: Path, serve_hub: Callable[[Path], list[str]]) -> None:
    reference = save("gpt2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    asked = serve_hub(tmp_path)
    model = load_model("hf:gpt2", pretrained=True)
    assert torch.equal(model.weights.load("lm_head.weight"), reference.lm_head.weight)
    shards = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert sorted(name for name in asked if name.startswith("model-")) == shards


def test_transformers_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"penstock\[text\]"):
        load_model("hf:gpt2")


def test_special_tokens_are_in_the_vocabulary() -> None:
    config = hf_config("gpt2", None, {"vocab_size": 512})
    assert (config.bos_token_id, config.eos_token_id) == (None, None)
    assert hf_config("gpt2", None, {}).eos_token_id == 50256
    assert hf_config("gpt2", None, {"vocab_size": 512, "eos_token_id": 7}).eos_token_id == 7


def _changed(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Save a Llama with another config.json and further tensors."""
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=False,
    ))  # fmt: skip
    made.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors", {"format": "pt"})


def test_quantized_weights_are_refused_with_their_method(tmp_path: Path) -> None:
    cases: list[tuple[Any, str]] = [
        ({"load_in_4bit": True}, "load_in_4bit"),
        ({"quant_method": "hqq"}, "hqq"),
        ({}, "unk"),
    ]
    for quantization, method in cases:
        _changed(tmp_path, {"quantization_config": quantization}, {})
        with pytest.raises(ModelError, match=rf"quantized \({method}"):
            load_model(f"hf:{tmp_path}")
        load_model(f"hf:{tmp_path}", weights=tmp_path / "model.safetensors")  # plain ones that are given


@pytest.mark.parametrize("name", ["self_attn.q_proj.weight_scale_inv", "mlp.up_proj.bias", "mlp.down_proj.scales"])
def test_a_tensor_that_a_layer_does_not_take_is_refused(name: str, tmp_path: Path) -> None:
    _changed(tmp_path, {}, {f"model.layers.0.{name}": torch.ones(2)})
    with pytest.raises(ModelError, match=name.rpartition(".")[2]):
        load_model(f"hf:{tmp_path}")


def test_tensors_of_other_heads_and_computed_ones_are_left_out(tmp_path: Path) -> None:
    more = {"score.weight": torch.ones(2, 16), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    _changed(tmp_path, {}, more)
    assert "score.weight" not in load_model(f"hf:{tmp_path}").weights.names()


def test_a_head_of_its_own_is_used_although_the_configuration_ties_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _changed(tmp_path, {"tie_word_embeddings": True}, {})
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    parts = load_model(f"hf:{tmp_path}", whole=True)
    assert not torch.equal(parts.weights.load("lm_head.weight"), parts.weights.load("model.embed_tokens.weight"))
    assert torch.equal(output(parts.module, parts.example_kwargs), output(reference, parts.example_kwargs))
    assert "lm_head.weight" in capsys.readouterr().err


def test_adapters_alone_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="merge_and_unload"):
        load_model(f"hf:{tmp_path}")


def test_a_generation_configuration_is_fetched(tmp_path: Path, serve_hub: Callable[[Path], list[str]]) -> None:
    _changed(tmp_path, {}, {})
    transformers.GenerationConfig(eos_token_id=[7, 9]).save_pretrained(tmp_path)
    serve_hub(tmp_path)
    assert load_generation_config("hf:someone/llama", pretrained=True).eos_token_id == [7, 9]
