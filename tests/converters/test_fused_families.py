"""Falcon, Phi, Persimmon and StableLM: what of them is refused, and tensors that don't fit a config."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ondevice.converters.architectures.adapting import norms_of_each_head, split_grouped
from ondevice.converters.architectures.registry import describe, read_config
from ondevice.converters.architectures.tensors import tensor_shapes
from ondevice.converters.checkpoints.views import Joined
from ondevice.errors import CheckpointError, UnsupportedModelError

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 32,
    "intermediate_size": 96,
}  # fmt: skip
CLASSES = {
    "falcon": "FalconForCausalLM", "phi": "PhiForCausalLM", "persimmon": "PersimmonForCausalLM",
    "stablelm": "StableLmForCausalLM",
}  # fmt: skip


def values(model_type: str, **changes: Any) -> dict[str, Any]:
    own = {key: value for key, value in SIZES.items() if (model_type, key) != ("falcon", "intermediate_size")}
    return own | {"model_type": model_type, "architectures": [CLASSES[model_type]]} | changes


class Vector(SimpleNamespace):
    """A tensor of a checkpoint: float32 values, one byte after the other."""

    def __init__(self, name: str, content: np.ndarray) -> None:
        super().__init__(name=name, shape=content.shape, content=content, dtype="F32", files=(name,))
        self.nbytes = self.values_nbytes = content.nbytes
        self.code_bits = 0

    def vector(self) -> np.ndarray:
        return self.content

    def sample(self, start: int, nbytes: int) -> bytes:
        return self.content.tobytes()[start : start + nbytes]


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    [
        ("falcon", {"alibi": True}, "alibi is true"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn 2 don't go with"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn False"),
        ("falcon", {"auto_map": {"AutoModel": "modeling_other.Model"}}, "auto_map"),
        ("phi", {"auto_map": {"AutoConfig": "someone/phi-2--configuration_evil.Phi"}}, "auto_map"),
        ("persimmon", {"hidden_act": "quick_gelu"}, "hidden_act"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    model_type: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read_config(values(model_type, **changes))


def test_the_authors_own_code_is_not_needed() -> None:
    code = {
        "AutoConfig": "configuration_falcon.FalconConfig",
        "AutoModel": "x/y--modeling_falcon.FalconModel",
    }
    assert read_config(values("falcon", auto_map=code)) == read_config(values("falcon"))


def test_frequencies_that_would_change_say_where_the_context_ends() -> None:
    scaling = {"type": "dynamic", "factor": 4.0}
    found = describe(values("persimmon", rope_scaling=scaling, max_position_embeddings=128))
    assert found.config == read_config(values("persimmon", max_position_embeddings=128))
    assert "ends at 128 tokens" in found.notes[0]
    assert describe(values("persimmon")).notes == ()


def test_a_fused_projection_of_another_size_is_refused() -> None:
    config = read_config(values("persimmon"))
    fused: Any = {"model.layers.0.qkv.weight": SimpleNamespace(name="qkv", shape=(191, 64))}
    with pytest.raises(CheckpointError, match="asks for 192 rows"):
        split_grouped(fused, config, "qkv")


@pytest.mark.parametrize("heads", [3, 4])
def test_a_norm_is_needed_for_every_head(heads: int) -> None:
    """Three of four leave out the norm, whose absence is then refused by name."""
    config = read_config(values("stablelm", num_key_value_heads=4, qk_layernorm=True))
    given: Any = {
        f"model.layers.0.self_attn.q_layernorm.norms.{head}.weight": Vector(
            str(head), np.full(16, head, np.float32)
        )
        for head in range(heads)
    }
    found = norms_of_each_head(given, config)
    name = "model.layers.0.self_attn.q_norm"
    assert f"{name}.weight" in tensor_shapes(config)
    assert set(found) == ({f"{name}.weight", f"{name}.bias"} if heads == 4 else set())
    if heads == 4:
        assert (found[f"{name}.weight"].vector() == np.repeat(np.arange(4), 16)).all()
        assert (found[f"{name}.bias"].vector() == 0).all()


def test_joined_vectors_are_one() -> None:
    parts: Any = tuple(Vector(str(i), np.arange(i, i + 3, dtype=np.float32)) for i in range(3))
    joined = Joined("all", parts)
    whole = np.concatenate([part.content for part in parts])
    assert (joined.shape, joined.nbytes, joined.files) == ((9,), whole.nbytes, ("0", "1", "2"))
    assert (joined.vector() == whole).all()
    assert joined.sample(7, 20) == whole.tobytes()[7:27]
    assert joined.sample(30, 20) == whole.tobytes()[30:]
