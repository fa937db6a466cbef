"""Small Qwen3.5 checkpoints with the layer that predicts one token more, and that layer in `transformers`."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.bundles import write_byte_tokenizer
from tests.support.families import CASES, write_model
from tests.support.models import to_bfloat16


def write_mtp_checkpoint(folder: Path, case: str = "qwen3.5") -> Any:
    """Write a random model of `families.CASES` with a random `mtp.*`; returns its `transformers` model."""
    family, options = CASES[case]
    model = write_model(folder, family, {**options, "vocab_size": 320})
    write_byte_tokenizer(folder)
    rng, width = np.random.default_rng(11), model.config.hidden_size
    layer = next(it for it in model.model.layers if hasattr(it, "self_attn"))
    shapes = {f"mtp.layers.0.{name}": tuple(it.shape) for name, it in layer.named_parameters()}
    norms = ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    shapes |= {f"{name}.weight": (width,) for name in norms} | {"mtp.fc.weight": (width, 2 * width)}
    path, found = folder / "model.safetensors", {}
    for name, shape in shapes.items():
        scale = 0.2 if len(shape) == 1 else 1.0 / np.sqrt(shape[1])
        found[name] = (rng.standard_normal(shape) * scale).astype(np.float16).astype(np.float32)
        # As in bfloat16, which published ones have.
        found[name] = (to_bfloat16(found[name]).astype(np.uint32) << 16).view(np.float32)
    save_file(load_file(path) | found, path, {"format": "pt"})
    change_config(folder, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
    return model


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def mtp_logits(
    folder: Path, model: Any, tokens: Sequence[int], hidden: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states (n, D) and logits (n, V) of the checkpoint's layer, by a `transformers` model of one
    layer of attention over what `mtp.fc` makes of embeddings and hidden states.

    hidden: (n, D) what the model's last norm or the layer's own has given, each behind the token before.
    """
    torch = pytest.importorskip("torch")
    w = {name: torch.from_numpy(it) for name, it in load_file(folder / "model.safetensors").items()}
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    one = type(model.model)(config).eval()
    state = {name.removeprefix("mtp."): it for name, it in w.items() if name.startswith("mtp.")}
    joined = state.pop("fc.weight")
    norms = [state.pop(f"pre_fc_norm_{it}.weight") for it in ("embedding", "hidden")]
    missing = one.load_state_dict(state, strict=False)
    assert missing.missing_keys == ["embed_tokens.weight"]
    assert not missing.unexpected_keys
    with torch.no_grad():
        own = model.model.embed_tokens(torch.tensor(list(tokens)))
        parts = []
        for x, norm in zip((own, torch.from_numpy(np.asarray(hidden, np.float32))), norms, strict=True):
            parts.append(x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps) * (1 + norm))
        entering = torch.cat(parts, -1) @ joined.T
        found = one(inputs_embeds=entering[None], use_cache=False).last_hidden_state[0]
        return found.numpy(), model.lm_head(found).numpy()
