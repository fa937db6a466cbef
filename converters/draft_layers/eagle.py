"""Adds EAGLE-3 heads (arXiv 2503.01840), as published by their authors and others, to a bundle of their
model.

Names and arithmetic are those of SafeAILab/EAGLE (`eagle/model/cnets.py`), of vLLM (`llama_eagle3.py`), of
deepseek-ai/DeepSpec, whose heads' queries and keys are normed, and of the `speculators` format, which nests a
Llama's keys. EAGLE-3.1 (arXiv 2605.09992) adds two options: `fc_norm`, a norm of each hidden state before
they are mixed, and `norm_output`, with which a draft continues from the output of the head's last norm. A
folder has `config.json` and safetensors files.

The hidden states are the inputs of layers 2, L / 2 and L - 3 of L, unless the config names others. At the
config's top level, layers are named by these inputs; in `eagle_config`, which SGLang reads, and in DeepSpec's
`target_layer_ids`, they are named by their outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.draft_layers import EAGLE_TAPS, EMBEDDINGS, TOKENS, DraftLayer
from ondevice.bundle.reader import Bundle
from ondevice.converters.architectures.common import ACTIVATION_NAMES
from ondevice.converters.architectures.config_reader import HARMLESS_KEYS, ConfigReader
from ondevice.converters.architectures.rotary import read_rope
from ondevice.converters.checkpoints.base import plain, some_of
from ondevice.converters.checkpoints.huggingface import MAX_CONFIG_BYTES, all_tensors
from ondevice.converters.checkpoints.safetensors_file import RawTensor, floating, read_tensors
from ondevice.converters.checkpoints.source_folder import SourceFolder
from ondevice.converters.draft_layers.write import check_draft_layers_possible, checked, write_draft_layer
from ondevice.converters.quantize import Weights
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import SIZE_LIMITS, ModelConfig

LAYER_PREFIXES = ("midlayer.", "layers.0.")
"""Prefixes of the decoder layer's tensors in the authors' files and in those of `speculators`."""
IGNORED = frozenset({"t2d", "d2t"})
"""The vocabulary's mask, and the offsets that imply it, which `_target_tokens` reads."""
HARMLESS = frozenset({
    "auto_map", "draft_vocab_size", "embed_requires_grad", "has_no_defaults_at_init", "hidden_act",
    "speculators_config", "speculators_model_type", "speculators_version", "target_hidden_size",
    "target_vocab_size", "max_window_layers", "sliding_window", "modules", "eagle_version", "layer_types",
    "draft_num_hidden_layers", "num_target_layers", "step_loss_decay", "target_model_name_or_path",
    "ttt_length",
})  # fmt: skip
MAX_HEAD_TENSORS = 64


def convert_eagle(source: str | Path, bundle_path: str | Path, bits: Any = 8) -> DraftLayer:
    """Add the EAGLE-3 head in the folder `source` to a bundle of the model that it was trained for.

    bits: bits of its matrices' codes, 4, 8 or 16.

    Raises ModelNotFoundError if `source` isn't a folder, CheckpointError if it is damaged or belongs to
    another model, UnsupportedModelError for weights in a pickle and for unknown arithmetic, and what
    `write_draft_layer` raises.
    """
    bundle = Bundle.open(bundle_path)
    check_draft_layers_possible(bundle)
    folder = SourceFolder(Path(source))
    values = _flat(folder.json("config.json", MAX_CONFIG_BYTES))
    with ExitStack() as opened:
        raw = _named(head_tensors(folder, opened))
        layer = checked(_described(ConfigReader(values), raw, bits, bundle.config), bundle.config)
        arrays = _arrays(layer, raw, bundle.config)
    return write_draft_layer(bundle.path, layer, arrays)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """The config's keys, merged with those of a nested `transformer_layer_config`."""
    inner = values.get("transformer_layer_config")
    if inner is None:
        return dict(values)
    if not isinstance(inner, dict):
        raise CheckpointError("config.json: transformer_layer_config must be an object")
    return {**inner, **{key: it for key, it in values.items() if key != "transformer_layer_config"}}


def head_tensors(folder: SourceFolder, opened: ExitStack) -> dict[str, RawTensor]:
    """All tensors of the folder by name. If it has a single file, that may have any name."""
    names = [name for name in folder.names() if name.endswith(".safetensors")]
    if len(names) == 1:
        return read_tensors(opened.enter_context(closing(folder.open(names[0]))))
    return all_tensors(folder, opened)


def _named(raw: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """The tensors by name, without the prefix of the layer. Raises CheckpointError if two then have the same
    name.
    """
    if len(raw) > MAX_HEAD_TENSORS:
        raise UnsupportedModelError(
            f"{len(raw)} tensors are more than an EAGLE-3 head has, which is one layer; give the head's own "
            "folder, not the model's"
        )
    named: dict[str, RawTensor] = {}
    for name, tensor in raw.items():
        short = name.removeprefix("model.")
        for prefix in LAYER_PREFIXES:
            short = short.replace(prefix, "layer.", 1) if short.startswith(prefix) else short
        if short in named:
            raise CheckpointError(f"{plain(name)} is there twice under two names; download the head again")
        named[short] = tensor
    return named


def _described(
    reader: ConfigReader, raw: Mapping[str, RawTensor], bits: Any, target: ModelConfig
) -> DraftLayer:
    """The description of the head, read from its config and its tensors."""
    reader.only("num_hidden_layers", 1)
    for key in ("pretraining_tp", "logit_scale"):
        reader.only(key, 1)
    for key in ("mlp_bias", "parallel_drafting", "norm_before_fc"):
        reader.only(key, False)
    layer = DraftLayer(
        kind="eagle",
        bits=bits,
        taps=_taps(reader, target.num_layers),
        qkv_bias=reader.boolean("attention_bias", False),
        output_bias=reader.boolean("attention_bias", False),
        head_norm="layer.self_attn.q_norm.weight" in raw,
        residual_normed=reader.boolean("norm_before_residual", False),
        states_normed=reader.boolean("norm_output", False),
        taps_normed=reader.boolean("fc_norm", False),
        own_head="lm_head.weight" in raw,
        own_embeddings="embed_tokens.weight" in raw,
        tokens=reader.integer("draft_vocab_size", reader.integer("vocab_size", target.vocab_size)),
        **layer_facts(reader, target),
    )
    reader.only("tie_word_embeddings", False)
    reader.close(HARMLESS_KEYS | HARMLESS)
    return layer


def layer_facts(reader: ConfigReader, target: ModelConfig) -> dict[str, Any]:
    """The fields of DraftLayer that most decoder layers have, and an empty `model`.

    Raises CheckpointError for a head of another model, UnsupportedModelError for unknown arithmetic.
    """
    hidden, heads = _size(reader, "hidden_size"), _size(reader, "num_attention_heads", "num_heads")
    vocabulary = reader.integer("vocab_size", target.vocab_size)
    if reader.integer("target_vocab_size", vocabulary) != target.vocab_size:
        raise CheckpointError(
            f"the head is for a vocabulary of {reader.integer('target_vocab_size', vocabulary)} tokens, and "
            f"the model has {target.vocab_size}; take the head that was trained for this model"
        )
    if reader.integer("target_hidden_size", target.hidden_size) != target.hidden_size:
        raise CheckpointError(
            f"the head is for a model of width {reader.integer('target_hidden_size', 0)}, and this one has "
            f"{target.hidden_size}; take the head that was trained for this model"
        )
    head_dim = _size(reader, "head_dim", default=max(1, hidden // heads))
    activation = reader.text("hidden_act", "silu")
    if activation not in ACTIVATION_NAMES:
        raise UnsupportedModelError(f"config.json: hidden_act {plain(activation)} isn't known")
    rope = read_rope(reader, head_dim, target.max_context)
    if rope.long_frequencies:
        raise UnsupportedModelError("config.json: heads with two sets of rotary frequencies aren't supported")
    reader.integer("max_position_embeddings", target.max_context)
    return {
        "model": "0" * 64,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": _size(reader, "num_key_value_heads", "num_kv_heads", default=heads),
        "head_dim": head_dim,
        "neurons": _size(reader, "intermediate_size"),
        "activation": ACTIVATION_NAMES[activation],
        "eps": reader.number("rms_norm_eps", 1e-6),
        "frequencies": rope.frequencies,
        "magnitude": rope.magnitude,
    }


def _size(reader: ConfigReader, key: str, limit: str = "", default: int | None = None) -> int:
    """A size from 1 to the limit for sizes of a model. Raises CheckpointError."""
    value, most = reader.integer(key, default), SIZE_LIMITS[limit or key]
    if not 1 <= value <= most:
        raise CheckpointError(f"config.json: {key} is {value}; it must be from 1 to {most}")
    return value


def _taps(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """The layers whose inputs are the three hidden states that the head reads."""
    key = "eagle_aux_hidden_state_layer_ids"
    nested = ConfigReader(reader.section("eagle_config") or {}, "config.json: eagle_config")
    nested.only("use_aux_hidden_state", True)
    listed, left = reader.numbers(key), nested.numbers(key) or reader.numbers("target_layer_ids")
    nested.close()
    taps = listed or ([it + 1 for it in left] if left else [2, layers // 2, layers - 3])
    if len(taps) != EAGLE_TAPS or not all(it == int(it) and 0 <= it <= layers for it in taps):
        raise CheckpointError(
            f"the head reads hidden states that enter layers {', '.join(f'{it:g}' for it in taps[:8])}; "
            f"three from 0 to {layers} are known here, as the model has {layers} layers: name them in "
            f"config.json's {key}"
        )
    return tuple(int(it) for it in taps)


def _arrays(layer: DraftLayer, raw: Mapping[str, RawTensor], target: ModelConfig) -> dict[str, Weights]:
    """The arrays that `write_draft_layer` takes, made from the head's tensors. Raises CheckpointError."""
    width, projections = layer.hidden_size, "layer.self_attn."
    sizes = {"q": layer.query_size, "k": layer.num_kv_heads * layer.head_dim}
    sizes["v"] = sizes["k"]
    expected: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, EAGLE_TAPS * target.hidden_size),
        f"{projections}o_proj.weight": (width, layer.query_size),
        "layer.mlp.gate_proj.weight": (layer.neurons, width),
        "layer.mlp.up_proj.weight": (layer.neurons, width),
        "layer.mlp.down_proj.weight": (width, layer.neurons),
        "layer.input_layernorm.weight": (width,),
        "layer.hidden_norm.weight": (width,),
        "layer.post_attention_layernorm.weight": (width,),
        "norm.weight": (width,),
    }
    for it, size in sizes.items():
        expected[f"{projections}{it}_proj.weight"] = (size, 2 * width)
        if layer.qkv_bias:
            expected[f"{projections}{it}_proj.bias"] = (size,)
    if layer.output_bias:
        expected[f"{projections}o_proj.bias"] = (width,)
    if layer.own_head:
        expected["lm_head.weight"] = (layer.tokens, width)
    if layer.own_embeddings:
        expected["embed_tokens.weight"] = (target.vocab_size, width)
    head_norms = {f"{it}_norm": f"{projections}{it}_norm.weight" for it in "qk" if layer.head_norm}
    expected |= dict.fromkeys(head_norms.values(), (layer.head_dim,))
    tap_norms = {f"tap_norm.{it}": f"fc_norm.{it}.weight" for it in range(EAGLE_TAPS) if layer.taps_normed}
    expected |= dict.fromkeys(tap_norms.values(), (target.hidden_size,))
    weights = checked_tensors(raw, expected, "an EAGLE-3 head", IGNORED)
    if layer.embedding_width(target) != width:
        raise CheckpointError(
            f"the head has no embeddings of its own and a width of {width}; the model's have "
            f"{target.embedding_size}"
        )
    qkv = np.concatenate([weights[f"{projections}{it}_proj.weight"] for it in sizes])
    arrays = {f"fc.{tap}": part for tap, part in enumerate(np.hsplit(weights["fc.weight"], EAGLE_TAPS))}
    arrays |= {"qkv.embedding": qkv[:, :width], "qkv.hidden": qkv[:, width:]}
    arrays |= {"out": weights[f"{projections}o_proj.weight"]}
    arrays |= {it: weights[f"layer.mlp.{it}_proj.weight"] for it in ("gate", "up", "down")}
    arrays |= {
        "embedding_norm": weights["layer.input_layernorm.weight"],
        "hidden_norm": weights["layer.hidden_norm.weight"],
        "feed_forward_norm": weights["layer.post_attention_layernorm.weight"],
        "final_norm": weights["norm.weight"],
    }
    arrays |= {name: weights[it] for name, it in (head_norms | tap_norms).items()}
    if layer.qkv_bias:
        arrays["qkv.bias"] = np.concatenate([weights[f"{projections}{it}_proj.bias"] for it in sizes])
    if layer.output_bias:
        arrays["out.bias"] = weights[f"{projections}o_proj.bias"]
    if layer.own_embeddings:
        arrays[EMBEDDINGS] = weights["embed_tokens.weight"]
    if layer.own_head:
        tokens = _target_tokens(layer, raw, target)
        order = np.argsort(tokens, kind="stable")
        arrays |= {"head": weights["lm_head.weight"][order], TOKENS: tokens[order]}
    return arrays


def checked_tensors(
    raw: Mapping[str, RawTensor], expected: Mapping[str, tuple[int, ...]], owner: str, ignored: Set[str]
) -> dict[str, Weights]:
    """The values of the expected tensors. owner: what they are part of, for messages.

    Raises CheckpointError for missing tensors and wrong shapes, UnsupportedModelError for further tensors.
    """
    missing = sorted(set(expected) - set(raw))
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors of {owner} are missing, {some_of(missing)}; is the download complete, "
            "and is it such a head?"
        )
    extra = sorted(set(raw) - set(expected) - ignored)
    if extra:
        raise UnsupportedModelError(f"{len(extra)} tensors are no part of {owner}, {some_of(extra)}")
    weights: dict[str, Weights] = {}
    for name, shape in expected.items():
        tensor = floating(raw[name])
        if tensor.shape != shape:
            raise CheckpointError(
                f"{name} has shape {list(tensor.shape)}; config.json and the model ask for {list(shape)}: "
                "take the head that was trained for this model"
            )
        weights[name] = tensor.vector() if len(shape) == 1 else tensor.rows(0, shape[0])
    return weights


def _target_tokens(layer: DraftLayer, raw: Mapping[str, RawTensor], target: ModelConfig) -> NDArray[np.int64]:
    """The target's id of each of the head's tokens: the head's id plus the offset in `d2t`.

    Raises CheckpointError.
    """
    head_ids = np.arange(layer.tokens, dtype=np.int64)
    offsets = raw.get("d2t")
    if offsets is None:
        if layer.tokens != target.vocab_size:
            raise CheckpointError(
                f"the head has {layer.tokens} of {target.vocab_size} tokens, and no d2t that says which"
            )
        return head_ids
    if offsets.dtype != "I64" or offsets.shape != (layer.tokens,):
        raise CheckpointError(
            f"d2t is {offsets.dtype} {list(offsets.shape)}; it must be I64 [{layer.tokens}], an offset each"
        )
    values = np.frombuffer(offsets.file.read(offsets.offset, offsets.nbytes), "<i8")
    # Before the sum, which could overflow.
    if (values < -target.vocab_size).any() or (values > target.vocab_size).any():
        raise CheckpointError("d2t has offsets beyond the vocabulary; download the head again")
    tokens: NDArray[np.int64] = head_ids + values
    if tokens.min() < 0 or tokens.max() >= target.vocab_size or len(np.unique(tokens)) < len(tokens):
        raise CheckpointError(
            f"d2t's offsets don't give each token another id from 0 to {target.vocab_size - 1}; download the "
            "head again"
        )
    return tokens
