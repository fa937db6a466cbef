"""Every key of `config.json`, changed: what changes `transformers` changes us alike, or is refused.

A key that is read by nobody is the fault that no fixed list of keys can show: the model converts and says
something else. So each value is changed in turn, and so are keys that only other families have. A change that
`transformers` can't load proves nothing, nor does one that changes its logits by less than the limit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.converters.architectures.registry import read_config
from ondevice.converters.convert import convert
from ondevice.errors import OndeviceError
from tests.converters.test_families import expected, tokens
from tests.support.engines import all_logits, running
from tests.support.families import CASES, write_model

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow

LIMIT = 2e-3
"""Of the largest logit."""
TIE = 1e-4
"""Margin of a router's logits below which another rounding may choose another expert."""
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")
"""Keys whose change asks for other tensors."""
NEVER_READ = (
    "architectures",
    "model_type",
    "transformers_version",
    "dtype",
    "initializer_range",
    "use_cache",
)
ELSEWHERE: dict[str, Any] = {
    "attention_bias": True,
    "attention_multiplier": 0.3,
    "attn_logit_softcapping": 0.3,
    "final_logit_softcapping": 0.3,
    "head_dim": 8,
    "hidden_act": "relu",
    "hidden_activation": "relu",
    "is_causal": False,
    "logit_scale": 0.3,
    "mlp_bias": True,
    "num_key_value_heads": 1,
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.25,
    "qk_norm": True,
    "query_pre_attn_scalar": 7,
    "rope_interleave": False,
    "rope_local_base_freq": 77.0,
    "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    "rope_theta": 5000.0,
    "scale_embedding": True,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
    "use_bias": True,
    "use_sliding_window": True,
}
"""Keys that families have in which they stand for something."""
LEFT_OUT = {
    "Gemma": ("hidden_activation",),
    "Phi3": ("original_max_position_embeddings",),
    "NemotronH": ("time_step_limit", "time_step_min"),
}
"""Keys by family that this release of `transformers` leaves unread, though the model was published with them,
or by which it chooses frequencies by a text's length, where here the context decides; or that it takes for
limits of time steps where it runs a prompt, but not token by token, as the models' authors never do."""
ACTIVATIONS = ("relu", "gelu", "silu", "gelu_new")


def changes(key: str, value: Any) -> Iterator[Any]:
    """Other values of the key."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from {value + 1, 1, 3} - {value}
    elif isinstance(value, float):
        yield 1.7 * value + 0.01
    elif isinstance(value, str):
        yield from (name for name in ACTIVATIONS if "act" in key and name != value)
    elif isinstance(value, list) and value != value[::-1]:
        yield value[::-1]
    elif value is None:
        yield from (True, 3, 0.5)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from ({**value, name: other} for other in changes(name, inner))


def theirs(folder: Path, family: str) -> np.ndarray | None:
    """The logits of `transformers`; None if it can't load the folder, or lacks tensors for it.

    Of the positions before the first whose choice of experts is a near tie: rounding may decide that.
    """
    kind = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")
    try:
        model, found = kind.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        lacks = found["missing_keys"] or found["mismatched_keys"]
        return None if lacks else expected(model.eval(), tokens())[: decided(model)]
    except Exception:  # It raises whatever its code runs into.
        return None


def decided(model: Any) -> int:
    """Number of positions before the first at which a router's margin is below TIE."""
    count, ids = getattr(model.config, "num_experts_per_tok", None), torch.tensor([tokens()])
    routed = any("experts" in name for name, _ in model.named_modules())
    if not count or not routed or not hasattr(model.config, "output_router_logits"):
        return len(tokens())
    with torch.no_grad():
        logits = np.stack([layer.numpy() for layer in model(ids, output_router_logits=True).router_logits])
    if logits.shape[-1] == count:
        return len(tokens())
    highest = np.sort(logits, axis=-1)[..., ::-1]
    near = (highest[..., count - 1] - highest[..., count] < TIE).any(axis=0)
    return int(np.argmax(near)) if near.any() else len(tokens())


def ours(folder: Path, output: Path) -> np.ndarray | None:
    """Our logits; None if the folder is refused."""
    try:
        with running(convert(folder, output, "f16", force=True), "reference") as loaded:
            found: np.ndarray = all_logits(loaded, tokens(), 32)
            return found
    except OndeviceError:
        return None


@pytest.mark.parametrize("case", CASES)
def test_no_key_is_dropped_in_silence(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    folder, unlike = tmp_path / "source", []
    write_model(folder, family, options)
    base = json.loads((folder / "config.json").read_text())
    before, known = theirs(folder, family), read_config(base)
    assert before is not None
    assert len(before)
    left_out = (*SIZES, *NEVER_READ, *LEFT_OUT.get(family, ()))
    changed = [(key, value) for key in base if key not in left_out for value in changes(key, base[key])]
    changed += [(key, value) for key, value in ELSEWHERE.items() if key not in (*base, *left_out)]
    compared = 0
    for key, value in changed:
        if key == "max_position_embeddings" and value < len(tokens()):
            # No text goes beyond its model's context here.
            continue
        (folder / "config.json").write_text(json.dumps({**base, key: value}))
        try:
            is_same = read_config({**base, key: value}) == known
        except OndeviceError:
            continue
        wanted = theirs(folder, family)
        if wanted is None or not len(wanted):
            continue
        both = min(len(wanted), len(before))
        if is_same and np.abs(wanted[:both] - before[:both]).max() < LIMIT * np.abs(before).max():
            continue
        found = ours(folder, tmp_path / "bundle")
        if found is None:
            continue
        compared += 1
        found = found[: len(wanted)]
        if not np.abs(found - wanted).max() < LIMIT * np.abs(wanted).max():
            unlike.append((key, value, float(np.abs(found - wanted).max() / np.abs(wanted).max())))
    assert unlike == []
    assert compared > 0
