"""Small checkpoints with the layer that predicts one token more, and that layer in `transformers`."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.bundles import write_byte_tokenizer
from tests.support.families import CASES, write_model
from tests.support.models import to_bfloat16

Tensors = dict[str, np.ndarray]
OF_QWEN = {
    "norm": "mtp.norm.weight",
    "embedding_norm": "mtp.pre_fc_norm_embedding.weight",
    "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
    "joining": "mtp.fc.weight",
    "layer": "mtp.layers.0.",
}
"""Names of a layer's own tensors, and how those of its blocks begin."""
OF_MIMO = {
    "norm": "model.mtp.layers.0.final_layernorm.weight",
    "embedding_norm": "model.mtp.layers.0.enorm.weight",
    "hidden_norm": "model.mtp.layers.0.hnorm.weight",
    "joining": "model.mtp.layers.0.eh_proj.weight",
    "layer": "model.mtp.layers.0.",
}
PUBLISHED = {
    "self_attn.sinks": "self_attn.attention_sink_bias",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
}
"""Names of tensors of MiMo V2's layers where `transformers` has others."""
FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""Experts' matrices as `transformers` holds them, stacked; in most folders each is a tensor."""


def names_ahead(model: Any) -> Mapping[str, str]:
    """The names of the layer in a checkpoint of a `transformers` model, as of OF_QWEN."""
    if model.config.model_type.startswith("qwen"):
        return OF_QWEN
    if model.config.model_type.startswith("mimo"):
        return OF_MIMO
    prefix = f"model.layers.{model.config.num_hidden_layers}."
    own = {
        "embedding_norm": "enorm",
        "hidden_norm": "hnorm",
        "joining": "eh_proj",
        "norm": "shared_head.norm",
    }
    return {it: f"{prefix}{name}.weight" for it, name in own.items()} | {"layer": prefix}


def write_mtp_checkpoint(folder: Path, case: str = "qwen3.5", stacked: bool = False) -> Any:
    """Write a random model of `families.CASES` with a random layer that predicts one token more, as published
    ones have it; returns its `transformers` model.

    stacked: whether the layer's experts are stacked, as some folders have them, not one by one.
    """
    family, options = CASES[case]
    model = write_model(folder, family, {**options, "vocab_size": 320})
    write_byte_tokenizer(folder)
    rng, width, names = np.random.default_rng(11), model.config.hidden_size, names_ahead(model)
    state = one_layer(model).state_dict()
    blocks = {it.removeprefix("layers.0."): tuple(v.shape) for it, v in state.items() if "layers.0." in it}
    its = PUBLISHED if names is OF_MIMO else {}
    shapes = {names["layer"] + its.get(name, name): shape for name, shape in blocks.items()}
    shapes |= {names[it]: (width,) for it in ("norm", "embedding_norm", "hidden_norm")}
    shapes[names["joining"]] = (width, 2 * width)
    path, found = folder / "model.safetensors", Tensors()
    for name, shape in shapes.items():
        scale = 0.2 if len(shape) == 1 else 1.0 / np.sqrt(shape[-1])
        found[name] = (rng.standard_normal(shape) * scale).astype(np.float16).astype(np.float32)
        # As in bfloat16, which published ones have.
        found[name] = (to_bfloat16(found[name]).astype(np.uint32) << 16).view(np.float32)
    own = load_file(path)
    if names is OF_QWEN:
        change_config(folder, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
    elif names is OF_MIMO:
        # Two more layers, which are left out.
        found |= {
            name.replace(".0.", f".{layer}."): -values for layer in (1, 2) for name, values in found.items()
        }
    else:
        change_config(folder, num_nextn_predict_layers=1)
        table = own["model.embed_tokens.weight"]
        head = own.get("lm_head.weight", table)
        found |= {
            f"{names['layer']}embed_tokens.weight": table,
            f"{names['layer']}shared_head.head.weight": head,
        }
    found = found if stacked else _one_by_one(found, names["layer"])
    save_file(own | found, path, {"format": "pt"})
    return model


def one_layer(model: Any) -> Any:
    """A `transformers` model of one layer of attention, with experts where the model has some.

    MiMo's is one of sliding attention without experts.
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    mimo = names_ahead(model) is OF_MIMO
    for key, value in (
        ("layer_types", ["sliding_attention" if mimo else "full_attention"]),
        ("mlp_layer_types", ["dense" if mimo else "sparse"]),
        ("first_k_dense_replace", 0),
        ("mlp_only_layers", []),
    ):
        if getattr(config, key, None) is not None:
            setattr(config, key, value)
    return type(model.model)(config).eval()


def _one_by_one(tensors: Tensors, prefix: str) -> Tensors:
    """Stacked experts as a tensor for each matrix."""
    found = dict(tensors)
    both, downs = (found.pop(prefix + name, None) for name in FUSED)
    if both is None or downs is None:
        return found
    for expert, (gate_up, down) in enumerate(zip(both, downs, strict=True)):
        gate, up = np.split(gate_up, 2)
        for which, values in (("gate", gate), ("up", up), ("down", down)):
            found[f"{prefix}mlp.experts.{expert}.{which}_proj.weight"] = np.ascontiguousarray(values)
    return found


def _stacked(tensors: Tensors) -> Tensors:
    """Experts' matrices as `transformers` holds them. tensors: of a layer, by its own names."""
    count = sum(name.startswith("mlp.experts.") and name.endswith(".down_proj.weight") for name in tensors)
    if not count:
        return tensors
    found = {name: it for name, it in tensors.items() if ".experts." not in name}

    def of(which: str) -> np.ndarray:
        return np.stack([tensors[f"mlp.experts.{expert}.{which}_proj.weight"] for expert in range(count)])

    return found | dict(zip(FUSED, (np.concatenate([of("gate"), of("up")], axis=1), of("down")), strict=True))


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def mtp_logits(
    folder: Path, model: Any, tokens: Sequence[int], hidden: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states (n, D) and logits (n, V) of the checkpoint's layer, by a `transformers` model of one
    layer of attention over what one matrix makes of embeddings and hidden states.

    hidden: (n, D) what the model's last norm or the layer's own has given, each behind the token before; of
    MiMo, and in the result, what either norm is given.
    """
    torch = pytest.importorskip("torch")
    tensors = {name: it.astype(np.float32) for name, it in load_file(folder / "model.safetensors").items()}
    names, one = names_ahead(model), one_layer(model)
    prefix = names["layer"]
    shared = {f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight"}
    inside = set(tensors) - set(names.values()) - shared
    layer = {name.removeprefix(prefix): tensors[name] for name in inside if name.startswith(prefix)}
    ours = {new: old for old, new in PUBLISHED.items()} if names is OF_MIMO else {}
    state = {f"layers.0.{ours.get(name, name)}": it for name, it in _stacked(layer).items()}
    state["norm.weight"] = tensors[names["norm"]]
    missing = one.load_state_dict(
        {it: torch.from_numpy(values) for it, values in state.items()}, strict=False
    )
    assert missing.missing_keys == ["embed_tokens.weight"]
    assert not missing.unexpected_keys
    # Qwen's norms are stored less one.
    shift, eps = float(names is OF_QWEN), model.config.rms_norm_eps
    with torch.no_grad():
        own = model.model.embed_tokens(torch.tensor(list(tokens)))
        parts = []
        for x, norm in (
            (own, names["embedding_norm"]),
            (torch.from_numpy(np.asarray(hidden, np.float32)), names["hidden_norm"]),
        ):
            weight = shift + torch.from_numpy(tensors[norm])
            parts.append(x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight)
        entering = torch.cat(parts, -1) @ torch.from_numpy(tensors[names["joining"]]).T
        entered: list[Any] = []
        one.norm.register_forward_hook(lambda norm, given, normed: entered.append(given[0][0]))
        found = one(inputs_embeds=entering[None], use_cache=False).last_hidden_state[0]
        goes_on = entered[0] if names is OF_MIMO else found
        return goes_on.numpy(), model.lm_head(found).numpy()
