"""Models with gated delta rules in GGUF files: their `config.json` values and their tensors.

Files contain decays, -exp(A_log), in place of a checkpoint's `A_log`. Qwen3.5's files also store the value
heads of a layer in another order: the first value head of every key head, then the second one of every key
head, and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.converters.architectures.adapting import (
    check_shape,
    norms_shifted,
    renamed,
    without_layers_ahead,
)
from ondevice.converters.architectures.common import Tensors
from ondevice.converters.checkpoints.base import SourceTensor
from ondevice.converters.checkpoints.gguf_experts import (
    AHEAD,
    layers_ahead,
    qwen2moe_keys,
    restored_experts,
)
from ondevice.converters.checkpoints.gguf_gemma import Values
from ondevice.converters.checkpoints.gguf_metadata import Metadata
from ondevice.converters.checkpoints.views import ColumnsOf, ComputedView, RowsOf
from ondevice.converters.quantize import Weights
from ondevice.errors import CheckpointError
from ondevice.model_config import DeltaSpec, ModelConfig

DELTA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    **{f"nextn.{name}": f"nextn.{name}" for name in AHEAD},
}
"""Names of a block's tensors in a checkpoint, by those in GGUF files. `ssm_in` occurs in older files."""


def heads_with_states(metadata: Metadata) -> tuple[int, int]:
    """Number of heads that have a state, and the width of all of them. Raises CheckpointError."""
    heads, inner = metadata.integer("ssm.time_step_rank"), metadata.integer("ssm.inner_size")
    if heads < 1 or inner % heads:
        raise CheckpointError(
            f"{metadata.header.file}: {metadata.prefix}ssm.inner_size is {inner}, for "
            f"{metadata.prefix}ssm.time_step_rank, {heads} heads; they must be of one width"
        )
    return heads, inner


def delta_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The sizes of delta rules, and which layers have one."""
    heads, inner = heads_with_states(metadata)
    ahead = layers_ahead(metadata, values)
    layers = values["num_hidden_layers"] - ahead
    keys = {
        "num_hidden_layers": layers,
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "full_attention_interval": metadata.integer("full_attention_interval", 4),
        "mtp_num_hidden_layers": ahead,
    }
    if (recurrent := metadata.array("attention.recurrent_layers")) is not None:
        if len(recurrent) != values["num_hidden_layers"]:
            raise CheckpointError(
                f"{metadata.header.file}: {metadata.prefix}attention.recurrent_layers has {len(recurrent)} "
                f"values for {values['num_hidden_layers']} layers"
            )
        kinds = ("full_attention", "linear_attention")
        keys["layer_types"] = [kinds[bool(is_recurrent)] for is_recurrent in recurrent[:layers]]
    # Which of three positions turns a pair of dimensions: in a text they are one and the same.
    metadata.array("rope.dimension_sections")
    return keys


def delta_expert_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The keys of delta rules and of experts.

    Files don't say whether weights are divided by their sum, so they are, as in all published models.
    """
    keys = {**delta_keys(metadata, values), **qwen2moe_keys(metadata, values)}
    return {**keys, "norm_topk_prob": metadata.boolean("expert_weights_norm", True)}


def restored_delta(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors of Qwen3-Next, as a checkpoint has them."""
    return _restored(tensors, config, interleaved=False)


def restored_interleaved_delta(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors of Qwen3.5, as a checkpoint has them. Its files store value heads in another order."""
    return _restored(tensors, config, interleaved=True)


def _restored(tensors: Tensors, config: ModelConfig, interleaved: bool) -> Tensors:
    tensors = without_layers_ahead(tensors, config)
    delta = {name: it for name, it in tensors.items() if ".linear_attn." in name}
    rest = norms_shifted({name: it for name, it in tensors.items() if name not in delta}, -1.0)
    delta = dict(renamed(delta, {"linear_attn.dt_proj.bias": "linear_attn.dt_bias"}))
    for layer, spec in enumerate(config.layers):
        if spec.delta is None:
            continue
        prefix = f"model.layers.{layer}.linear_attn."
        if interleaved and spec.delta.value_heads != spec.delta.key_heads:
            _with_heads_in_order(delta, prefix, spec.delta)
        if (decays := delta.get(f"{prefix}A_log")) is not None:
            delta[f"{prefix}A_log"] = DecayLogs(f"{prefix}A_log", decays)
    return restored_experts({**rest, **delta}, config) if config.experts else {**rest, **delta}


def _with_heads_in_order(tensors: dict[str, SourceTensor], prefix: str, delta: DeltaSpec) -> None:
    """Sort value heads by their key heads, in the tensors whose names begin with `prefix`."""
    heads = np.arange(delta.value_heads).reshape(-1, delta.key_heads).T.reshape(-1)
    width = delta.value_width
    values = (heads[:, None] * width + np.arange(width)).reshape(-1)
    channels = np.concatenate([np.arange(2 * delta.key_size), 2 * delta.key_size + values])

    def rows(picks: NDArray[np.int64]) -> Callable[[str, SourceTensor], SourceTensor]:
        return lambda name, source: RowsOf(name, source, picks)

    def columns(name: str, source: SourceTensor) -> SourceTensor:
        return ColumnsOf(name, source, values, width)

    moves = {
        "in_proj_qkv.weight": (0, channels, rows(channels)),
        "conv1d.weight": (0, channels, rows(channels)),
        "in_proj_z.weight": (0, values, rows(values)),
        "in_proj_b.weight": (0, heads, rows(heads)),
        "in_proj_a.weight": (0, heads, rows(heads)),
        "A_log": (0, heads, rows(heads)),
        "dt_bias": (0, heads, rows(heads)),
        "out_proj.weight": (1, values, columns),
    }
    for suffix, (dimension, picks, moved) in moves.items():
        if (source := tensors.get(prefix + suffix)) is None:
            continue
        if len(source.shape) <= dimension:
            raise CheckpointError(
                f"{source.name} has shape {list(source.shape)}; config.json asks for more dimensions"
            )
        wanted = list(source.shape)
        wanted[dimension] = len(picks)
        check_shape(source, tuple(wanted))
        tensors[prefix + suffix] = moved(prefix + suffix, source)


@dataclass(frozen=True)
class DecayLogs(ComputedView):
    """`A_log`, computed from a stored vector -exp(A_log) in float64 and rounded to float32.

    The exponential of this rounded logarithm is within one unit in the last place of the decay.
    """

    name: str
    source: SourceTensor

    def rows(self, start: int, stop: int) -> Weights:
        return self.vector()[start:stop]

    def columns(self, start: int, stop: int) -> Weights:
        raise ValueError(f"{self.name} is a vector; it has no columns")

    def vector(self) -> NDArray[np.float32]:
        """The vector `A_log`, (n,). Raises CheckpointError for a decay that isn't minus an exponential."""
        decays = self.source.vector()
        if decays.size and decays.max() >= 0.0:
            raise CheckpointError(
                f"{self.files[0].path.name}: the decays of {self.name} go up to {decays.max():g}; they must "
                "be below 0; download the file again"
            )
        return np.log(-decays.astype(np.float64)).astype(np.float32)
