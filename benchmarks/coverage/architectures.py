"""The architectures of the benchmark, with random weights and small configurations; nothing is downloaded."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A name, how to build the model, and how to make its inputs for a batch size."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]


QUICK = (
    "timm:deit_tiny_patch16_224",
    "timm:swin_tiny_patch4_window7_224",
    "timm:resnet18",
    "timm:mixer_s32_224",
    "hf:GPT2Config",
    "hf:BertConfig",
    "hf:AlbertConfig",
    "hf:T5Config",
)

# name: image size
_TIMM: Mapping[str, int] = {
    # vision transformers
    "deit_tiny_patch16_224": 224,
    "deit_tiny_distilled_patch16_224": 224,
    "deit3_small_patch16_224": 224,
    "vit_tiny_r_s16_p8_224": 224,
    "vit_relpos_small_patch16_224": 224,
    "vit_small_patch14_dinov2": 518,
    "beit_base_patch16_224": 224,
    "eva02_tiny_patch14_224": 224,
    "flexivit_small": 240,
    "cait_xxs24_224": 224,
    "xcit_nano_12_p16_224": 224,
    "swin_tiny_patch4_window7_224": 224,
    "swinv2_tiny_window8_256": 256,
    "swinv2_cr_tiny_224": 224,
    "twins_svt_small": 224,
    "pit_ti_224": 224,
    "pvt_v2_b0": 224,
    "crossvit_tiny_240": 240,
    "convit_tiny": 224,
    "volo_d1_224": 224,
    "mvitv2_tiny": 224,
    "hiera_tiny_224": 224,
    "nest_tiny": 224,
    "davit_tiny": 224,
    "gcvit_xxtiny": 224,
    "tiny_vit_5m_224": 224,
    # hybrids of convolution and attention
    "levit_128s": 224,
    "mobilevit_xxs": 256,
    "mobilevitv2_050": 256,
    "efficientformer_l1": 224,
    "efficientvit_m0": 224,
    "efficientvit_b0": 224,
    "fastvit_t8": 256,
    "coat_lite_tiny": 224,
    "coatnet_nano_rw_224": 224,
    "maxvit_rmlp_pico_rw_256": 256,
    "edgenext_xx_small": 256,
    "visformer_tiny": 224,
    "botnet26t_256": 256,
    # convolution
    "resnet18": 224,
    "resnet50": 224,
    "seresnet50": 224,
    "res2net50_26w_4s": 224,
    "densenet121": 224,
    "vgg11_bn": 224,
    "inception_v3": 299,
    "efficientnet_b0": 224,
    "mobilenetv3_small_100": 224,
    "ghostnet_100": 224,
    "regnety_002": 224,
    "repvgg_a0": 224,
    "nfnet_l0": 224,
    "hrnet_w18_small": 224,
    "dla34": 224,
    "convnext_atto": 224,
    "convnextv2_atto": 224,
    "focalnet_tiny_srf": 224,
    "starnet_s1": 224,
    "mambaout_femto": 224,
    # mixers
    "mixer_s32_224": 224,
    "resmlp_12_224": 224,
    "gmlp_ti16_224": 224,
    "poolformer_s12": 224,
    "sequencer2d_s": 224,
}

_WIDTH = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
_GROUPED = {**_WIDTH, "num_key_value_heads": 2, "vocab_size": 200}
_IMAGE = {**_WIDTH, "image_size": 64, "patch_size": 16}
_SOUND = {**_WIDTH, "conv_dim": (32, 32), "conv_kernel": (10, 8), "conv_stride": (5, 8), "num_feat_extract_layers": 2,
          "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "vocab_size": 32}  # fmt: skip
_BOTH = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 200}  # fmt: skip

# configuration's class: model's class, kind of input, arguments of the configuration
_TRANSFORMERS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    # encoders of text
    "BertConfig": ("BertForSequenceClassification", "masked", {**_WIDTH, "vocab_size": 200}),
    "RobertaConfig": ("RobertaForMaskedLM", "masked", {**_WIDTH, "vocab_size": 200}),
    "DistilBertConfig": ("DistilBertModel", "masked",
                         {"dim": 64, "n_layers": 4, "n_heads": 4, "hidden_dim": 128, "vocab_size": 200}),
    "ElectraConfig": ("ElectraForPreTraining", "masked", {**_WIDTH, "embedding_size": 32, "vocab_size": 200}),
    "AlbertConfig": ("AlbertForMaskedLM", "masked", {**_WIDTH, "embedding_size": 32, "vocab_size": 200}),
    "DebertaV2Config": ("DebertaV2Model", "masked", {**_WIDTH, "vocab_size": 200, "relative_attention": True,
                                                     "pos_att_type": ["p2c", "c2p"], "position_buckets": 16}),
    "MPNetConfig": ("MPNetModel", "masked", {**_WIDTH, "vocab_size": 200}),
    "ModernBertConfig": ("ModernBertForMaskedLM", "masked", {**_WIDTH, "vocab_size": 200, "pad_token_id": 0,
                         "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}),
    "RoFormerConfig": ("RoFormerModel", "masked", {**_WIDTH, "vocab_size": 200, "embedding_size": 64}),
    "SqueezeBertConfig": ("SqueezeBertModel", "masked", {**_WIDTH, "vocab_size": 200, "embedding_size": 64}),
    "MobileBertConfig": ("MobileBertModel", "masked", {**_WIDTH, "vocab_size": 200, "embedding_size": 32,
                                                       "intra_bottleneck_size": 32, "true_hidden_size": 32}),
    "FNetConfig": ("FNetModel", "tokens", {**_WIDTH, "vocab_size": 200}),
    "NystromformerConfig": ("NystromformerModel", "masked", {**_WIDTH, "vocab_size": 200, "num_landmarks": 20,
                                                   "segment_means_seq_len": 20}),
    "ConvBertConfig": ("ConvBertModel", "masked", {**_WIDTH, "vocab_size": 200, "embedding_size": 64}),
    "XLNetConfig": ("XLNetModel", "masked", {"d_model": 64, "n_layer": 4, "n_head": 4, "d_inner": 128,
                                             "vocab_size": 200}),
    # decoders of text
    "GPT2Config": ("GPT2LMHeadModel", "masked", {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 200}),
    "GPTNeoConfig": ("GPTNeoForCausalLM", "masked", {"hidden_size": 64, "num_layers": 4, "num_heads": 4,
                     "attention_types": [[["global", "local"], 2]], "vocab_size": 200, "window_size": 8}),
    "GPTNeoXConfig": ("GPTNeoXForCausalLM", "masked", {**_WIDTH, "vocab_size": 200}),
    "GPTJConfig": ("GPTJForCausalLM", "masked", {"n_embd": 64, "n_layer": 4, "n_head": 4, "rotary_dim": 8,
                                                 "vocab_size": 200}),
    "OPTConfig": ("OPTForCausalLM", "masked", {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
                                               "ffn_dim": 128, "word_embed_proj_dim": 64, "vocab_size": 200}),
    "BloomConfig": ("BloomForCausalLM", "masked", {"hidden_size": 64, "n_layer": 4, "n_head": 4, "vocab_size": 200}),
    "FalconConfig": ("FalconForCausalLM", "masked", {"hidden_size": 64, "num_hidden_layers": 4,
                                                     "num_attention_heads": 4, "vocab_size": 200}),
    "LlamaConfig": ("LlamaForCausalLM", "masked", _GROUPED),
    "MistralConfig": ("MistralForCausalLM", "masked", {**_GROUPED, "sliding_window": 8}),
    "Qwen2Config": ("Qwen2ForCausalLM", "masked", _GROUPED),
    "Qwen3Config": ("Qwen3ForCausalLM", "masked", {**_GROUPED, "head_dim": 16}),
    "GemmaConfig": ("GemmaForCausalLM", "masked", {**_GROUPED, "head_dim": 16}),
    "Gemma2Config": ("Gemma2ForCausalLM", "masked", {**_GROUPED, "head_dim": 16, "sliding_window": 8}),
    "PhiConfig": ("PhiForCausalLM", "masked", {**_WIDTH, "vocab_size": 200}),
    "OlmoConfig": ("OlmoForCausalLM", "masked", {**_GROUPED, "pad_token_id": 1, "eos_token_id": 2}),
    "StableLmConfig": ("StableLmForCausalLM", "masked", _GROUPED),
    "MambaConfig": ("MambaForCausalLM", "tokens", {"hidden_size": 64, "num_hidden_layers": 4, "state_size": 8,
                                                   "vocab_size": 200}),
    # encoders and decoders
    "T5Config": ("T5ForConditionalGeneration", "both", {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2,
                                                        "num_heads": 4, "vocab_size": 200}),
    "BartConfig": ("BartForConditionalGeneration", "both", _BOTH),
    "PegasusConfig": ("PegasusForConditionalGeneration", "both", _BOTH),
    "MarianConfig": ("MarianMTModel", "both", {**_BOTH, "pad_token_id": 1, "decoder_start_token_id": 1}),
    "WhisperConfig": ("WhisperForConditionalGeneration", "speech", {**_BOTH, "num_mel_bins": 16,
                      "max_source_positions": 20, "max_target_positions": 20, "pad_token_id": 1, "bos_token_id": 1,
                      "eos_token_id": 1, "decoder_start_token_id": 1}),
    # sound
    "Wav2Vec2Config": ("Wav2Vec2ForCTC", "sound", _SOUND),
    "HubertConfig": ("HubertModel", "sound", _SOUND),
    "ASTConfig": ("ASTForAudioClassification", "spectrum", {**_WIDTH, "max_length": 64, "num_mel_bins": 32}),
    # images
    "ViTConfig": ("ViTForImageClassification", "image", _IMAGE),
    "DeiTConfig": ("DeiTForImageClassificationWithTeacher", "image", _IMAGE),
    "BeitConfig": ("BeitForImageClassification", "image", {**_IMAGE, "use_relative_position_bias": True}),
    "Dinov2Config": ("Dinov2ForImageClassification", "image", _IMAGE),
    "SwinConfig": ("SwinForImageClassification", "image", {"image_size": 64, "patch_size": 4, "embed_dim": 16,
                   "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}),
    "SegformerConfig": ("SegformerForSemanticSegmentation", "image", {"depths": [1, 1, 1, 1],
                        "hidden_sizes": [16, 16, 32, 32], "decoder_hidden_size": 32}),
    "ConvNextConfig": ("ConvNextForImageClassification", "image", {"hidden_sizes": [16, 24, 32, 40],
                                                                   "depths": [1, 1, 2, 1]}),
    "ResNetConfig": ("ResNetForImageClassification", "image", {"embedding_size": 16, "depths": [1, 1, 2, 1],
                                                               "hidden_sizes": [16, 32, 48, 64]}),
    "CLIPConfig": ("CLIPModel", "pair", {"text_config": {**_WIDTH, "vocab_size": 200, "eos_token_id": 199},
                                         "vision_config": _IMAGE, "projection_dim": 32}),
}  # fmt: skip


def architectures() -> list[Architecture]:
    """Give all architectures: those of timm, then those of transformers."""
    from_timm = [Architecture(f"timm:{name}", _timm(name), _images(size)) for name, size in _TIMM.items()]
    return from_timm + [
        Architecture(f"hf:{name}", _hf(name), _INPUTS[_TRANSFORMERS[name][1]]) for name in _TRANSFORMERS
    ]


def asked(prog: str, doc: str | None) -> tuple[list[Architecture], Path]:
    """Read the command line of a benchmark over architectures; returns which ones, and where rows and summary go."""
    parser = argparse.ArgumentParser(prog=prog, description=doc)
    parser.add_argument("--json", type=Path, required=True, help="where to write rows and summary")
    parser.add_argument("--quick", action="store_true", help=f"only {len(QUICK)} architectures")
    parser.add_argument("--only", default="", help="only architectures whose name contains this")
    options = parser.parse_args()
    chosen = [a for a in architectures() if options.only in a.name and (not options.quick or a.name in QUICK)]
    return chosen, options.json


def _timm(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, pretrained=False)
        return model

    return build


def _hf(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        kind, _, settings = _TRANSFORMERS[name]
        config = getattr(transformers, name)(**settings)
        config.use_cache = False
        model: nn.Module = getattr(transformers, kind)(config)
        return model

    return build


def _images(size: int) -> Callable[[int], Inputs]:
    return lambda batch: {"x": torch.randn(batch, 3, size, size)}


def _tokens(batch: int, length: int = 20) -> Tensor:
    return torch.randint(3, 200, (batch, length))


def _mask(batch: int, length: int = 20) -> Tensor:
    """Hide the last positions of every second row, as padding does."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[1::2, -4:] = 0
    return mask


_INPUTS: Mapping[str, Callable[[int], Inputs]] = {
    "tokens": lambda batch: {"input_ids": _tokens(batch)},
    "masked": lambda batch: {"input_ids": _tokens(batch), "attention_mask": _mask(batch)},
    "both": lambda batch: {
        "input_ids": _tokens(batch), "attention_mask": _mask(batch), "decoder_input_ids": _tokens(batch, 9),
    },
    "speech": lambda batch: {
        "input_features": torch.randn(batch, 16, 40), "decoder_input_ids": torch.randint(3, 200, (batch, 9)),
    },
    "sound": lambda batch: {"input_values": torch.randn(batch, 2000)},
    "spectrum": lambda batch: {"input_values": torch.randn(batch, 64, 32)},
    "image": lambda batch: {"pixel_values": torch.randn(batch, 3, 64, 64)},
    "pair": lambda batch: {
        "input_ids": _tokens(batch), "pixel_values": torch.randn(batch, 3, 64, 64), "attention_mask": _mask(batch),
    },
}  # fmt: skip
