"""Folders that `mlx-lm` has quantised, converted and run on the MLX backend: its logits and ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.bundle.reader import Bundle
from ondevice.converters.convert import convert
from tests.support.engines import bundle_weights, error, random_tokens
from tests.support.families import CASES, write_model
from tests.support.mlx_models import ON_GPU, loaded
from tests.support.models import write_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("mlx_device")]

TOLERANCE = 2e-2 if ON_GPU else 1e-3
"""Of logits, of the largest, as of the reference in `test_mlx.py`."""


def quantised_by_mlx_lm(folder: Path, bits: int, mode: str, dtype: str, **options: Any) -> Path:
    """A folder of random weights as `mlx_lm.convert` writes it; attention has 6 bits where `bits` is 3."""
    utils = pytest.importorskip(
        "mlx_lm.utils", reason="mlx-lm is missing: pip install mlx-lm", exc_type=ImportError
    )
    shape = {"hidden_size": 128, "intermediate_size": 384, "max_position_embeddings": 256}
    source = write_checkpoint(folder / "source", dtype=dtype, **(shape | options))
    model, config = utils.load_model(source)

    def predicate(path: str, module: Any) -> Any:
        return {"bits": 6, "group_size": 64} if bits == 3 and "self_attn" in path else True

    group = 32 if mode == "mxfp4" else 64
    model, config = utils.quantize_model(model, config, group, bits, mode=mode, quant_predicate=predicate)
    utils.save_model(folder / "mlx", model)
    utils.save_config(config, folder / "mlx" / "config.json")
    return folder / "mlx"


def logits_of_mlx_lm(folder: Path, tokens: list[int], replaced: dict[str, np.ndarray]) -> np.ndarray:
    """(T, V) logits in float32, with the matrices of `replaced` in place of its own.

    Keys and values are rounded to float16, as this runtime and a float16 model round them.
    """
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_unflatten
    from mlx_lm import utils
    from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

    class HalfCache(KVCache):  # type: ignore[misc]
        def update_and_fetch(self, keys: Any, values: Any) -> Any:
            rounded = (x.astype(mx.float16).astype(mx.float32) for x in (keys, values))
            return super().update_and_fetch(*rounded)

    def half(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*map(half, cache.caches))
        return HalfCache() if isinstance(cache, KVCache) else cache

    model, _ = utils.load_model(folder)
    model.set_dtype(mx.float32)
    theirs, mine = dict(model.named_modules()), []
    for name, weight in replaced.items():
        module = name.removesuffix(".weight")
        kind = nn.Embedding if "embed" in name else nn.Linear
        plain = kind(*weight.shape) if kind is nn.Embedding else kind(*weight.shape[::-1], bias=False)
        plain.weight = mx.array(weight)
        if "bias" in theirs[module]:
            plain.bias = theirs[module].bias
        mine.append((module, plain))
    model.update_modules(tree_unflatten(mine))
    return np.array(model(mx.array([tokens]), cache=[*map(half, make_prompt_cache(model))])[0])


@pytest.mark.parametrize(("bits", "mode", "dtype", "options"), [
    (4, "affine", "F16", {}), (8, "affine", "F16", {"num_key_value_heads": 2}),
    (4, "affine", "BF16", {"family": "qwen3", "tie_word_embeddings": True}),
    (3, "affine", "BF16", {"family": "qwen2"}), (4, "mxfp4", "F16", {"family": "mistral"}),
])  # fmt: skip
def test_logits_are_those_of_mlx_lm(
    tmp_path: Path, bits: int, mode: str, dtype: str, options: dict[str, Any]
) -> None:
    """What a bundle can't copy, down projections at least, is replaced there by our rounding of it."""
    source = quantised_by_mlx_lm(tmp_path, bits, mode, dtype, **options)
    bundle = Bundle.open(convert(source, tmp_path / "b"))
    assert bundle.quant.bits == (8 if bits == 8 else 4)
    notes = dict(note.split(": ", 1) for note in bundle.manifest.provenance.notes)
    rounded = {kind for kind, note in notes.items() if f"rounded to {bundle.quant.bits} bits" in note}
    assert rounded == {"down"}
    words = {"attention": "self_attn", "embedding": "embed_tokens", "head": "lm_head"}
    replaced = {
        name: values
        for name, values in bundle_weights(bundle.path).items()
        if values.ndim == 2 and any(words.get(kind, f"{kind}_proj") in name for kind in rounded)
    }
    tokens = random_tokens(bundle.config, 100)
    theirs = logits_of_mlx_lm(source, tokens, replaced)
    with loaded(bundle.path) as model:
        assert error(model.logits(tokens), theirs) < TOLERANCE


ROUTERS = ("mlp.gate", "block_sparse_moe.gate")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("case", ["olmoe renormalised", "qwen3 moe renormalised", "mixtral"])
def test_logits_of_experts_are_those_of_mlx_lm(tmp_path: Path, case: str, bits: int) -> None:
    """All experts' codes are copied, and routers aren't quantised here: what they choose would be rounded."""
    utils = pytest.importorskip(
        "mlx_lm.utils", reason="mlx-lm is missing: pip install mlx-lm", exc_type=ImportError
    )
    import mlx.core as mx

    family, options = CASES[case]
    neurons = {key: 64 for key in ("intermediate_size", "moe_intermediate_size") if key in options}
    write_model(tmp_path / "source", family, {**options, **neurons, "hidden_act": "silu"})
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config.setdefault("num_experts", config.get("num_local_experts"))
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    model, config = utils.load_model(tmp_path / "source")
    model.set_dtype(mx.float16)  # so that scales are of a type that bundles hold
    model, config = utils.quantize_model(
        model, config, 64, bits, quant_predicate=lambda path, module: not path.endswith(ROUTERS)
    )
    utils.save_model(tmp_path / "mlx", model)
    utils.save_config(config, tmp_path / "mlx" / "config.json")
    bundle = Bundle.open(convert(tmp_path / "mlx", tmp_path / "b"))
    notes = dict(note.split(": ", 1) for note in bundle.manifest.provenance.notes)
    assert {"expert_gate", "expert_up", "expert_down"} <= set(notes)
    assert all("copied" in note for note in notes.values()), notes
    tokens = random_tokens(bundle.config, 60)
    theirs = logits_of_mlx_lm(tmp_path / "mlx", tokens, {})
    with loaded(bundle.path) as model:
        assert error(model.logits(tokens), theirs) < TOLERANCE


MIXERS: dict[str, dict[str, Any]] = {
    "granite hybrid": {"residual_multiplier": 0.25, "mamba_n_groups": 1},
    "granite hybrid moe": {},
    "nemotron h": {},
    "nemotron h moe": {},
    "falcon h1": {"attention_in_multiplier": 1.0, "key_multiplier": 1.0, "mlp_multipliers": [0.5, 2.0]},
}
"""Cases, with factors that mlx-lm has, and powers of two where matrices take them. It norms Granite's groups
together, so there is one."""


@pytest.mark.parametrize("case", MIXERS)
def test_logits_of_mixers_are_those_of_mlx_lm(tmp_path: Path, case: str) -> None:
    """Of one checkpoint, not quantised, whose prompt mlx-lm runs in its chunked form."""
    pytest.importorskip("mlx_lm.utils", reason="mlx-lm is missing: pip install mlx-lm", exc_type=ImportError)
    family, options = CASES[case]
    source = tmp_path / "source"
    write_model(source, family, options | MIXERS[case])
    bundle = Bundle.open(convert(source, tmp_path / "b", "f16"))
    config = json.loads((source / "config.json").read_text())
    # Names of before `transformers` 5, and no limit of time steps in the place of infinity.
    kinds = {"linear_attention": "mamba", "full_attention": "attention"}
    config["layer_types"] = [kinds[it] for it in config.get("layer_types", [])] or None
    config["position_embedding_type"] = "nope"
    config["rope_theta"] = config.get("rope_parameters", {}).get("rope_theta")
    if not isinstance(config["time_step_limit"][1], float):
        config["time_step_limit"] = [0.0, 1e30]
    (source / "config.json").write_text(json.dumps(config))
    tokens = random_tokens(bundle.config, 60)
    theirs = logits_of_mlx_lm(source, tokens, {})
    with loaded(bundle.path) as model:
        found = error(model.logits(tokens), theirs)
    print(f"{case}: {found:.1e}")
    assert found < TOLERANCE
