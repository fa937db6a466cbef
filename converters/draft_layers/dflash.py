"""Adds published layers that draft a block of tokens at once to a bundle of their model.

DFlash (arXiv 2602.06036) has the names and arithmetic of z-lab/dflash, DSpark (arXiv 2607.05147) those of
deepseek-ai/DeepSpec, or of SGLang, whose configs nest DSpark's keys as DFlash's are nested. A folder has
`config.json` and safetensors files. `target_layer_ids` names hidden states by the layers whose outputs they
are; -1 is the embedding.

The first row of a block belongs to the text's last token. In DFlash it drafts nothing, in DSpark it does.
Embeddings and head are the model's; DSpark contains copies. DSpark's confidence head isn't read, because the
runtime measures how many draft tokens are worth a pass's time.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.bundle.draft_layers import EMBEDDINGS, MAX_BLOCK, MAX_BLOCK_LAYERS, MAX_BLOCK_TAPS, DraftLayer
from ondevice.bundle.reader import Bundle
from ondevice.converters.architectures.config_reader import HARMLESS_KEYS, ConfigReader, shown
from ondevice.converters.checkpoints.base import plain
from ondevice.converters.checkpoints.huggingface import MAX_CONFIG_BYTES
from ondevice.converters.checkpoints.safetensors_file import RawTensor
from ondevice.converters.checkpoints.source_folder import SourceFolder
from ondevice.converters.draft_layers.eagle import checked_tensors, head_tensors, layer_facts
from ondevice.converters.draft_layers.write import check_draft_layers_possible, checked, write_draft_layer
from ondevice.converters.quantize import Weights
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import ModelConfig

ANCHORED = {"DFlashDraftModel": False, "Qwen3DSparkModel": True, "DSparkDraftModel": True}
"""By architecture, whether a block's first row drafts."""
FAMILY = ("dflash", "dspark", "domino")
"""Parts of the names of architectures that draft blocks, known here or not."""
IGNORED = frozenset({
    "embed_tokens.weight", "lm_head.weight", "confidence_head.proj.weight", "confidence_head.proj.bias",
})  # fmt: skip
HARMLESS = frozenset({
    "auto_map", "confidence_head_alpha", "confidence_head_with_markov", "enable_confidence_head",
    "use_confidence_head", "max_window_layers", "num_anchors", "tie_word_embeddings",
})  # fmt: skip


def is_block_head(source: str | Path) -> bool:
    """Whether a folder contains layers that draft blocks, of a known form or not.

    Raises ModelNotFoundError if it isn't a folder, CheckpointError if its config can't be read.
    """
    config = SourceFolder(Path(source)).json("config.json", MAX_CONFIG_BYTES)
    names = f"{config.get('architectures')} {config.get('speculators_model_type')}".lower()
    return "dflash_config" in config or any(it in names for it in FAMILY)


def convert_dflash(source: str | Path, bundle_path: str | Path, bits: Any = 8) -> DraftLayer:
    """Add the layers in the folder `source` to a bundle of the model that they were trained for.

    bits: bits of their matrices' codes, 4, 8 or 16.

    Raises ModelNotFoundError if `source` isn't a folder, CheckpointError if it is damaged or belongs to
    another model, UnsupportedModelError for weights in a pickle and for unknown arithmetic, and what
    `write_draft_layer` raises.
    """
    bundle = Bundle.open(bundle_path)
    check_draft_layers_possible(bundle)
    if bundle.config.embedding_multiplier != 1.0:
        raise UnsupportedModelError(
            f"{bundle.name} multiplies its embeddings by {bundle.config.embedding_multiplier:g}; layers that "
            "draft blocks are read only for models that don't"
        )
    folder = SourceFolder(Path(source))
    values = folder.json("config.json", MAX_CONFIG_BYTES)
    nested = values.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise CheckpointError(f"config.json: dflash_config is {shown(nested)}; it must be an object")
    reader = ConfigReader({**values, **nested, "dflash_config": None})
    with ExitStack() as opened:
        layer = checked(_described(reader, bits, bundle.config), bundle.config)
        arrays = _arrays(layer, head_tensors(folder, opened), bundle.config)
    return write_draft_layer(bundle.path, layer, arrays)


def _described(reader: ConfigReader, bits: Any, target: ModelConfig) -> DraftLayer:
    """The description of the layers, read from their config."""
    named = reader.texts("architectures") or ["no architecture"]
    if named[0] not in ANCHORED or reader.text("speculators_model_type", ""):
        raise UnsupportedModelError(
            f"config.json names {plain(named[0])}; layers that draft blocks are read of "
            f"{', '.join(ANCHORED)}, as the authors of DFlash and DSpark publish them"
        )
    anchored = ANCHORED[named[0]]
    for key, allowed in (("causal", False), ("is_causal", False), ("markov_head_type", "vanilla")):
        reader.only(key, allowed)
    if anchored:
        reader.only("projector_type", "dspark")
        reader.only("shift_label", True)
    else:
        reader.only("markov_rank", 0)
    if reader.integer("num_target_layers", target.num_layers) != target.num_layers:
        raise CheckpointError(
            f"the head is for a model of {reader.integer('num_target_layers')} layers, and this one has "
            f"{target.num_layers}; take the head that was trained for this model"
        )
    block = reader.integer("block_size")
    if not 2 <= block <= MAX_BLOCK:
        raise CheckpointError(f"config.json: block_size is {block}; it must be from 2 to {MAX_BLOCK}")
    layer = DraftLayer(
        kind="dflash",
        bits=bits,
        taps=_taps(reader, target.num_layers),
        tokens=target.vocab_size,
        head_norm=True,
        windows=_windows(reader),
        block=block,
        mask=reader.integer("mask_token_id"),
        anchored=anchored,
        markov_rank=reader.integer("markov_rank", 0),
        **layer_facts(reader, target),
    )
    reader.close(HARMLESS_KEYS | HARMLESS)
    return layer


def _taps(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """The layers whose inputs are the hidden states. No published head reads the output of the last layer."""
    listed = reader.numbers("target_layer_ids") or []
    known = all(it == int(it) and -1 <= it < layers - 1 for it in listed)
    if not 1 <= len(listed) <= MAX_BLOCK_TAPS or not known:
        raise CheckpointError(
            f"config.json: target_layer_ids is {shown(listed)}; it must be 1 to {MAX_BLOCK_TAPS} layers from "
            f"-1 to {layers - 2}, as the model has {layers}: take the head that was trained for this model"
        )
    return tuple(int(it) + 1 for it in listed)


def _windows(reader: ConfigReader) -> tuple[int, ...]:
    """The window of each layer, 0 for all of the text. Raises CheckpointError."""
    count, types = reader.integer("num_hidden_layers"), reader.texts("layer_types")
    if not 1 <= count <= MAX_BLOCK_LAYERS or (types is not None and len(types) != count):
        raise CheckpointError(
            f"config.json: num_hidden_layers is {count}, and layer_types has {len(types or ())} names; from "
            f"1 to {MAX_BLOCK_LAYERS} layers are known, with a name each"
        )
    if types is None:
        reader.only("use_sliding_window", False)
        types = ["full_attention"] * count
    windows = {"full_attention": 0, "sliding_attention": reader.integer("sliding_window", 0)}
    reader.boolean("use_sliding_window", False)
    unknown = [it for it in types if it not in windows]
    if unknown:
        raise UnsupportedModelError(f"config.json: layer_types has {plain(unknown[0])}, which isn't known")
    if "sliding_attention" in types and windows["sliding_attention"] < 1:
        raise CheckpointError("config.json: layer_types has sliding_attention, but sliding_window is missing")
    return tuple(windows[it] for it in types)


def _arrays(layer: DraftLayer, raw: Mapping[str, RawTensor], target: ModelConfig) -> dict[str, Weights]:
    """The arrays that `write_draft_layer` takes, made from the head's tensors. Raises CheckpointError."""
    short = {name.removeprefix("model.").removeprefix("markov_head."): it for name, it in raw.items()}
    if len(short) < len(raw):
        raise CheckpointError("a tensor of the head is there twice under two names; download it again")
    lengths, width = layer.vectors(target), layer.hidden_size
    queries, keys = layer.query_size, layer.num_kv_heads * layer.head_dim
    expected: dict[str, tuple[int, ...]] = {"fc.weight": (width, len(layer.taps) * target.hidden_size)}
    vectors = {"hidden_norm": "hidden_norm.weight", "final_norm": "norm.weight"}
    matrices: dict[str, str] = {}
    for number in range(len(layer.windows)):
        stored_layer, source_layer = f"{number}.", f"layers.{number}."
        for which, rows in (("q", queries), ("k", keys), ("v", keys)):
            expected[f"{source_layer}self_attn.{which}_proj.weight"] = (rows, width)
        matrices[f"{stored_layer}out"] = f"{source_layer}self_attn.o_proj.weight"
        matrices |= {
            stored_layer + it: f"{source_layer}mlp.{it}_proj.weight" for it in ("gate", "up", "down")
        }
        vectors |= {f"{stored_layer}{it}_norm": f"{source_layer}self_attn.{it}_norm.weight" for it in "qk"}
        vectors[f"{stored_layer}attention_norm"] = f"{source_layer}input_layernorm.weight"
        vectors[f"{stored_layer}feed_forward_norm"] = f"{source_layer}post_attention_layernorm.weight"
    if layer.markov_rank:
        matrices["markov"] = "markov_w2.weight"
        expected["markov_w1.weight"] = (target.vocab_size, layer.markov_rank)
    shapes = layer.matrices(target)
    expected |= {it: shapes[name].shape for name, it in matrices.items()}
    expected |= {it: (lengths[name],) for name, it in vectors.items()}
    weights = checked_tensors(short, expected, "a DFlash or DSpark head", IGNORED)
    parts = np.hsplit(weights["fc.weight"], len(layer.taps))
    arrays = {f"fc.{tap}": part for tap, part in enumerate(parts)}
    for number in range(len(layer.windows)):
        each = [weights[f"layers.{number}.self_attn.{it}_proj.weight"] for it in "qkv"]
        arrays[f"{number}.qkv"] = np.concatenate(each)
    arrays |= {name: weights[it] for name, it in (matrices | vectors).items()}
    return arrays | ({EMBEDDINGS: weights["markov_w1.weight"]} if layer.markov_rank else {})
