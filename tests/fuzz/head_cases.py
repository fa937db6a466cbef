"""EAGLE-3, DFlash and DSpark heads, and checkpoints with a layer that predicts one token more, for `convert
FOLDER --draft-for`: configuration, headers, weights; and what comes of them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import ondevice
from ondevice.bundle.reader import Bundle
from ondevice.converters.draft_layers.dflash import convert_dflash, is_block_head
from ondevice.converters.draft_layers.eagle import convert_eagle
from ondevice.converters.draft_layers.mtp import convert_mtp, has_layers_ahead
from ondevice.errors import BundleError, OndeviceError
from ondevice.units import process_memory
from tests.fuzz.bases import Bases
from tests.fuzz.checkpoint_cases import CONVERT_BYTES, change_index, change_tensors
from tests.fuzz.mutations import (
    NUMBERS,
    change_json,
    changed_bytes,
    changed_json,
    is_plain,
    json_bytes,
    make_odd,
)
from tests.fuzz.outcomes import Difference
from tests.fuzz.texts import Trial, copied

CONFIG_KEYS = [
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "draft_vocab_size", "target_vocab_size", "target_hidden_size",
    "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "hidden_act", "attention_bias",
    "norm_before_residual", "eagle_aux_hidden_state_layer_ids", "eagle_config", "transformer_layer_config",
    "tie_word_embeddings", "mlp_bias", "fc_norm", "norm_output", "architectures", "block_size",
    "mask_token_id", "target_layer_ids", "dflash_config", "layer_types", "sliding_window", "markov_rank",
]  # fmt: skip
COMPUTED = "computes logits that are not finite"
"""What a head of finite weights may be refused with when it drafts."""


def make(folder: Path, rng: random.Random, bases: Bases) -> None:
    """A changed head in the new folder `folder`/head, or a checkpoint in `folder`/source, and its bundle."""
    if bases.checkpoints_ahead and rng.random() < 0.5:
        found = rng.choice(bases.checkpoints_ahead)
        head = copied(found / "source", folder / "source")
        copied(found / "bundle", folder / "bundle")
    else:
        head = copied(rng.choice(bases.heads), folder / "head")
        copied(rng.choice(bases.bundles), folder / "bundle")
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if (head / "config.json").exists() and all(map(is_plain, head.iterdir())):
            _change(head, rng)


def run(folder: Path, rng: random.Random) -> int:
    """Convert; what comes of it must verify and draft for a text that is the one without drafts."""
    allowed = process_memory().current_bytes + CONVERT_BYTES
    bundle, source, bits = folder / "bundle", folder / "source", rng.choice([4, 8, 16])
    before, kind = Bundle.open(bundle).draft_layers, "mtp"
    try:
        if source.exists():
            has_layers_ahead(source)
            convert_mtp(source, bundle, bits)
        else:
            add = convert_dflash if is_block_head(folder / "head") else convert_eagle
            kind = add(folder / "head", bundle, bits).kind
    except OndeviceError as error:
        if Bundle.open(bundle).draft_layers != before:
            raise Difference(f"refused, but it has taken the place of the older layer: {error}") from error
        error.allowed_bytes = allowed  # type: ignore[attr-defined]
        raise
    try:
        ondevice.verify(bundle)
        return max(allowed, Trial(bundle, rng, drafter=kind).run())
    except OndeviceError as error:
        if isinstance(error, BundleError) and COMPUTED in str(error):
            raise
        raise Difference(f"converted, but refused: {type(error).__name__}: {error}") from error


def _change(head: Path, rng: random.Random) -> None:
    how, index = rng.random(), head / "model.safetensors.index.json"
    if how < 0.45:
        _change_config(head / "config.json", rng)
    elif how < 0.75:
        change_tensors(rng.choice(sorted(head.glob("*.safetensors"))), rng)
    elif how < 0.85 and index.exists():
        change_index(index, rng)
    elif how < 0.95:
        path = rng.choice(sorted(head.iterdir()))
        data = path.read_bytes()
        path.write_bytes(changed_json(data, rng) if path.suffix == ".json" else changed_bytes(data, rng))
    else:
        make_odd(rng.choice(sorted(head.iterdir())), rng)


def _change_config(path: Path, rng: random.Random) -> None:
    try:
        config: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return
    inner = config.get("transformer_layer_config") if isinstance(config, dict) else None
    place = inner if isinstance(inner, dict) and rng.random() < 0.7 else config
    if isinstance(place, dict) and rng.random() < 0.6:
        keys = [*CONFIG_KEYS, *sorted(place)]
        value = rng.choice(NUMBERS) if rng.random() < 0.5 else place.get(rng.choice(keys))
        place[rng.choice(keys)] = value
    else:
        change_json(config, rng)
    path.write_bytes(json_bytes(config, rng))
