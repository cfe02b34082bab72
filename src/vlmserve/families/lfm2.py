"""LFM2 and LFM2.5: gated short convolutions in most layers, attention in the others. LFM2-VL adds images."""

from __future__ import annotations

from vlmserve.families.family import LanguageFamily, NamedModel, VisionFamily
from vlmserve.families.gguf import Clip, GGUFText, GGUFTower, Metadata, clip_names, clip_scale, clip_sizes
from vlmserve.families.llama import LLAMA
from vlmserve.families.spec import ArchSpec, Config, HeadNormSpec, Names, NormSpec, require, usual_spec
from vlmserve.layer_specs import ConvolutionSpec

_LFM2: Config = {
    **LLAMA,
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}
LFM2_NAMES: Names = (
    (r"\.operator_norm\.", ".attention_norm."),
    (r"\.ffn_norm\.", ".mlp_norm."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
    (r"\bembedding_norm\.", "norm."),
)


def _gguf_traits(metadata: Metadata) -> Config:
    """The file states the final MLP size, and layers without KV heads are convolutions."""
    heads = metadata.array("attention.head_count_kv")
    return {
        "norm_eps": metadata["attention.layer_norm_rms_epsilon"],
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": metadata["shortconv.l_cache"],
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2(config: Config) -> ArchSpec:
    require(config, {"conv_bias": (False, "biases of convolutions")})
    layers, norm = range(config["num_hidden_layers"]), NormSpec(config["norm_eps"])
    attending = config.get("full_attn_idxs")
    kinds = config.get("layer_types") or [
        "full_attention" if attending is None or layer in attending else "conv" for layer in layers
    ]
    convolution = ConvolutionSpec(config["hidden_size"], config["conv_L_cache"])
    settings = {
        **config,
        "intermediate_size": _intermediate_size(config),
        "tie_word_embeddings": config.get("tie_embedding", config["tie_word_embeddings"]),
    }
    return usual_spec(
        settings,
        norm=norm,
        activation="silu",
        states=[convolution if kind == "conv" else None for kind in kinds],
        head_norm=HeadNormSpec("head", norm),
    )


def _intermediate_size(config: Config) -> int:
    """Two thirds of the stated size, rounded up, unless the config says that the size is final."""
    size = int(config.get("block_ff_dim", config["intermediate_size"]))
    if not config["block_auto_adjust_ff_dim"]:
        return size
    size = int(2 * size / 3)
    if (factor := config["block_ffn_dim_multiplier"]) is None:
        return size
    multiple: int = config["block_multiple_of"]
    return -(-int(factor * size) // multiple) * multiple


def _vision(clip: Clip) -> Config:
    sizes = {name: size for name, size in clip_sizes(clip).items() if name != "image_size"}
    patches = clip.tensor("v.position_embd.weight").shape[0]
    return {
        **sizes,
        "model_type": "siglip2_vision_model",
        "num_patches": patches,
        "hidden_act": "gelu_pytorch_tanh",
    }


def _projector(clip: Clip) -> Config:
    return {
        "downsample_factor": clip_scale(clip, 2),
        "projector_hidden_size": clip.tensor("mm.1.weight").shape[0],
        "projector_bias": clip.has("mm.1.bias"),
        "projector_use_layernorm": clip.has("mm.input_norm.weight"),
    }


def _image_processor(clip: Clip) -> Config:
    """Files lack tiles and bounds, so the defaults hold, as in the published checkpoints."""
    sizes = {"encoder_patch_size": clip["patch_size"], "downsample_factor": clip_scale(clip, 2)}
    return {"image_processor_type": "Lfm2VlImageProcessor", **sizes}


_TOWER = GGUFTower(
    vision=_vision,
    settings=_image_processor,
    more=_projector,
    names=(
        *clip_names("vision_tower.vision_model"),
        (r"mm\.input_norm\.(\w+)", r"multi_modal_projector.layer_norm.\1"),
        (r"mm\.([12])\.(\w+)", r"multi_modal_projector.linear_\1.\2"),
    ),
    output="mm.2.weight",
    text_types={"lfm2": "lfm2"},
    channels_last=True,
    swaps=False,
)

FAMILIES = (
    LanguageFamily(
        model_type="lfm2",
        architecture="Lfm2ForCausalLM",
        defaults=_LFM2,
        build=_lfm2,
        names=LFM2_NAMES,
        gguf={
            "lfm2": GGUFText(
                _gguf_traits,
                layer_names={f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
            )
        },
        models="LFM2 and LFM2.5 350M to 2.6B",
        short_names=(
            NamedModel("lfm2:1.2b", "LiquidAI/LFM2-1.2B", 1170340608, 134217728),
            NamedModel("lfm2.5:1.2b", "LiquidAI/LFM2.5-1.2B-Instruct", 1170340608, 134217728),
        ),
    ),
    VisionFamily(
        model_type="lfm2_vl",
        architecture="Lfm2VlForConditionalGeneration",
        text_type="lfm2",
        tied=True,
        tower="vlmserve.models.vision.squares:SquareVision",
        image_processor="vlmserve.media.squares:SquareProcessor.from_files",
        image_processor_types=("Lfm2Vl",),
        image_token_id=396,
        gguf={"lfm2": _TOWER},
        models="LFM2-VL and LFM2.5-VL 450M to 3B",
        short_names=(
            NamedModel("lfm2-vl:450m", "LiquidAI/LFM2-VL-450M", 450822656, 67108864, 96338688),
            NamedModel("lfm2-vl:1.6b", "LiquidAI/LFM2-VL-1.6B", 1584804000, 134217728, 414463392),
            NamedModel("lfm2.5-vl:1.6b", "LiquidAI/LFM2.5-VL-1.6B", 1584794784, 134217728, 414454176),
        ),
    ),
)
