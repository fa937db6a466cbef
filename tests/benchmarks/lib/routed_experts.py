"""A GGUF file in the shape of a mixture of experts with random weights in Q4_0, routed as a trace says.

`ondevice convert` makes the bundle of it, so that both engines have the same weights. How it follows a trace:

- The last `steps` channels of the residual stream carry the step: the embedding of token `FIRST` + s has row
  s of a Hadamard matrix there, whose rows are orthogonal. No layer writes to these channels: the rows of
  mixers' outputs and of the experts' downs that would have scales of zero, and codes like any other.
- A router reads these channels alone. Its matrix is the sum over steps of the chosen experts' `SCORE` times
  the step's row. Norms divide all channels by one number, so they change no choice.
- The head's row of token `FIRST` + s + 1 reads step s, louder than all others. So after step s both engines
  choose the next step's token: greedy text is the trace, step by step.

Nothing repeats: every block has codes and a scale of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Float32, Int32
from tests.benchmarks.lib import hybrid_gguf
from tests.benchmarks.lib.expert_trace import RoutingTrace, extended, read_trace
from tests.benchmarks.lib.hybrid_gguf import BLOCK, BLOCK_BYTES
from tests.support.gguf_families import ARCHITECTURES, add_config

FIRST = 16
"""The token of step 0."""
SCORE = np.float32(8)
"""A chosen expert's score for its step, and 0 for other experts, where the step's channels are 1."""
FREE_IN_HEAD = np.float32(0.05)
"""The last norm's weights of channels that carry no step."""
SCALES = (0.002, 0.008)
"""Least and most scale of a matrix's blocks, of either sign: outputs have about the size of inputs."""
QUIET = 0.25
"""Factor of what layers add to the residual stream, so that its steps are heard behind 48 of them."""
WRITERS = ("attn_output", "ssm_out", "ffn_down_exps", "ffn_down_shexp")
"""Matrices whose outputs are added to the residual stream."""
EMBEDDING_SCALE = 0.25
UP, DOWN = 12, 4
"""Codes of 1 and -1 at that scale: 8 stands for 0."""
PIECE_ROWS = 1 << 15
SEED = 26


@dataclass(frozen=True)
class RoutedShape:
    """Sizes of a Qwen3-MoE model, or of a Qwen3.5-MoE one.

    steps: a power of two, at most the hidden size less a block. trace: the one that it is routed by. joined:
    layers of the trace whose choices are one layer's here. taken: the best choices of each of these layers
    that count; 0: all. hybrid: three layers of four have gated delta rules, and a shared expert stands beside
    the others of every layer.
    """

    name: str = "qwen3-30b-a3b"
    layers: int = 48
    hidden: int = 2048
    experts: int = 128
    neurons: int = 768
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    vocabulary: int = 151_936
    steps: int = 1024
    trace: str = "qwen"
    joined: int = 1
    taken: int = 0
    hybrid: bool = False

    @property
    def free(self) -> int:
        """Channels that carry no step: the first ones."""
        return self.hidden - self.steps

    def config(self, chosen: int) -> dict[str, Any]:
        """The keys of a `config.json`. chosen: experts of a token."""
        config: dict[str, Any] = {
            "model_type": "qwen3_5_moe_text" if self.hybrid else "qwen3_moe",
            "hidden_size": self.hidden,
            "intermediate_size": self.neurons * chosen,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_experts": self.experts,
            "num_experts_per_tok": chosen,
            "moe_intermediate_size": self.neurons,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        }
        if self.hybrid:
            same = hybrid_gguf.HYBRID_4B
            config |= {key: value for key, value in same.items() if key.startswith("linear_")}
            config["rope_parameters"] = same["rope_parameters"]
            config["shared_expert_intermediate_size"] = self.neurons
            kinds = [*["linear_attention"] * 3, "full_attention"]
            config["layer_types"] = (kinds * self.layers)[: self.layers]
        return config


QWEN3_30B_A3B = RoutedShape()
GPT_OSS_20B = RoutedShape("gpt-oss-20b", 24, 2880, 32, 2880, 64, 8, 64, 201_088, trace="gptoss", joined=2)
"""Its sizes alone: weights in Q4_0 instead of MXFP4, no sinks, no biases."""
QWEN36_35B_A3B = RoutedShape(
    "qwen3.6-35b-a3b", 40, 2048, 256, 512, 16, 2, 256, 248_320, joined=2, taken=4, hybrid=True
)
"""Its 8 experts of 256 are the best 4 of 128 in two layers of the trace."""


def routed_steps(shape: RoutedShape, trace: RoutingTrace | None = None) -> Int32:
    """(steps, L, k): the experts of every step, those of the shape's trace or of `trace`, made longer.

    Where a token of the prompt didn't reach a layer, its experts are those of the prompt's last token.
    """
    trace = trace or read_trace(shape.trace)
    chosen = extended(trace, shape.steps - trace.prompt, SEED).chosen[: shape.steps].copy()
    token, layer = np.nonzero((chosen < 0).any(axis=2))
    chosen[token, layer] = chosen[trace.prompt - 1, layer]
    if shape.joined == 1:
        return chosen[:, : shape.layers]
    return joined_layers(chosen[:, :, : shape.taken or None], shape, trace.experts)


def joined_layers(chosen: Int32, shape: RoutedShape, experts: int) -> Int32:
    """(steps, L, k) of a trace with other layers and experts: what several of its layers chose, as one's.

    Layers are taken from the whole of the trace. A layer's experts are numbered behind those of the layer
    before it, modulo the shape's. Of two that become one the later is the next expert that wasn't chosen.
    experts: of a layer of the trace.
    """
    steps, layers, k = chosen.shape
    taken = [
        (layer + part * shape.layers) % layers
        for part in range(shape.joined)
        for layer in range(shape.layers)
    ]
    parts = chosen[:, taken].reshape(steps, shape.joined, shape.layers, k).transpose(0, 2, 1, 3)
    numbers = parts + experts * np.arange(shape.joined, dtype=np.int32)[:, None]
    found: Int32 = numbers.reshape(steps, shape.layers, -1) % shape.experts
    for place in range(1, found.shape[2]):
        while (meets := (found[:, :, :place] == found[:, :, place : place + 1]).any(axis=2)).any():
            found[:, :, place] = np.where(meets, (found[:, :, place] + 1) % shape.experts, found[:, :, place])
    return found


def step_rows(steps: int) -> Float32:
    """(steps, steps) orthogonal rows of 1 and -1: Sylvester's Hadamard matrix."""
    rows = np.ones((1, 1), np.float32)
    while len(rows) < steps:
        rows = np.block([[rows, rows], [rows, -rows]])
    return rows


def router(shape: RoutedShape, chosen: Int32) -> Float32:
    """(E, D) of one layer; chosen: (steps, k)."""
    wanted = np.zeros((shape.steps, shape.experts), np.float32)
    np.put_along_axis(wanted, chosen, SCORE, axis=1)
    found = np.zeros((shape.experts, shape.hidden), np.float32)
    found[:, shape.free :] = wanted.T @ step_rows(shape.steps) / shape.steps
    return found


def tensors(shape: RoutedShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors, in the file's order."""
    d, f, e = shape.hidden, shape.neurons, shape.experts
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.vocabulary, d)}
    for layer in range(shape.layers):
        own: dict[str, tuple[int, ...]] = {"ffn_gate_inp": (e, d)}
        own |= {"ffn_gate_exps": (e, f, d), "ffn_up_exps": (e, f, d), "ffn_down_exps": (e, d, f)}
        if shape.hybrid:
            found |= hybrid_gguf.mixer_shapes(shape.config(1), layer)
            own |= {"ffn_gate_inp_shexp": (d,), "ffn_gate_shexp": (f, d), "ffn_up_shexp": (f, d)}
            own["ffn_down_shexp"] = d, f
        else:
            own = _attention_shapes(shape) | own
        found |= {f"blk.{layer}.{name}.weight": size for name, size in own.items()}
    return found | {"output_norm.weight": (d,), "output.weight": (shape.vocabulary, d)}


def _attention_shapes(shape: RoutedShape) -> dict[str, tuple[int, ...]]:
    d, head = shape.hidden, shape.head_dim
    queries, keys = shape.heads * head, shape.kv_heads * head
    own: dict[str, tuple[int, ...]] = {"attn_norm": (d,), "attn_q": (queries, d), "attn_k": (keys, d)}
    own |= {"attn_v": (keys, d), "attn_q_norm": (head,), "attn_k_norm": (head,)}
    return own | {"attn_output": (d, queries), "ffn_norm": (d,)}


def is_quantised(name: str, size: tuple[int, ...]) -> bool:
    """Whether a tensor is in Q4_0; norms, routers and the small parts of delta rules are float32."""
    return hybrid_gguf.is_quantised(name, size) and not name.endswith("ffn_gate_inp.weight")


def routed_gguf(shape: RoutedShape, workdir: Path, chosen: Int32 | None = None) -> Path:
    """The file, 17 GB in the shape's own size, written a piece at a time; re-used when present.

    chosen: (steps, L, k), those of `routed_steps` if not given. Needs the `gguf` package.
    """
    import gguf

    path = workdir / f"{shape.name}-{shape.layers}-routed-q4_0.gguf"
    if path.is_file():
        return path
    workdir.mkdir(parents=True, exist_ok=True)
    chosen = routed_steps(shape) if chosen is None else chosen
    partial = path.with_suffix(".partial")
    config = shape.config(chosen.shape[2])
    writer = gguf.GGUFWriter(partial, ARCHITECTURES[config["model_type"]])
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q4_0))
    add_config(writer, config)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    sizes, q4_0 = tensors(shape), gguf.GGMLQuantizationType.Q4_0
    for name, size in sizes.items():
        if is_quantised(name, size):
            stored = (*size[:-1], size[-1] // BLOCK * BLOCK_BYTES)
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), int(np.prod(stored)), raw_dtype=q4_0)
        else:
            writer.add_tensor_info(name, size, np.dtype(np.float32), 4 * int(np.prod(size)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    values = _Values(shape, chosen)
    for name, size in sizes.items():
        _write(writer, values.pieces(name, size))
    writer.close()
    os.sync()
    partial.rename(path)
    return path


def _write(writer: Any, pieces: Iterator[NDArray[Any]]) -> None:
    """Write one tensor in pieces, at the file's alignment."""
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    written = 0
    for piece in pieces:
        piece.tofile(file)
        written += piece.nbytes
    writer.write_padding(file, written)


class _Values:
    """The values of all tensors, or the bytes of their blocks, in pieces."""

    def __init__(self, shape: RoutedShape, chosen: Int32) -> None:
        self._shape, self._chosen = shape, chosen
        self._random = np.random.default_rng(SEED)
        self._step_codes = np.where(step_rows(shape.steps) > 0, UP, DOWN).astype(np.uint8)

    def pieces(self, name: str, size: tuple[int, ...]) -> Iterator[NDArray[Any]]:
        """A tensor's elements in order."""
        shape, kind = self._shape, name.removesuffix(".weight").split(".")[-1]
        if kind == "ffn_gate_inp":
            yield router(shape, self._chosen[:, int(name.split(".")[1])])
        elif kind == "output_norm":
            yield np.where(np.arange(shape.hidden) < shape.free, FREE_IN_HEAD, np.float32(1))
        elif kind == "ffn_gate_inp_shexp":
            yield (0.02 * self._random.standard_normal(size)).astype(np.float32)
        elif not is_quantised(name, size):
            yield hybrid_gguf.plain_values(name, size, self._random)
        else:
            rows, groups = int(np.prod(size[:-1])), size[-1] // BLOCK
            factor = QUIET if kind in WRITERS else 1.0
            for start in range(0, rows, PIECE_ROWS):
                blocks = self._blocks(min(PIECE_ROWS, rows - start), groups, factor)
                self._plant(kind, start, blocks)
                yield blocks

    def _blocks(self, rows: int, groups: int, factor: float) -> NDArray[np.uint8]:
        """(rows, groups, 18) random codes and scales."""
        count = rows * groups
        blocks = np.frombuffer(self._random.bytes(count * BLOCK_BYTES), np.uint8).reshape(count, -1).copy()
        # Codes have a mean below 0, which scales of one sign would give to all outputs alike.
        drawn, (least, most) = self._random.uniform(-1, 1, count), SCALES
        scales = np.copysign(least + np.abs(drawn) * (most - least), drawn) * factor
        blocks[:, :2] = scales.astype("<f2").view(np.uint8).reshape(-1, 2)
        return blocks.reshape(rows, groups, BLOCK_BYTES)

    def _plant(self, kind: str, start: int, blocks: NDArray[np.uint8]) -> None:
        """Change rows from `start` on as the routing asks for."""
        shape, rows = self._shape, start + np.arange(len(blocks))
        if kind in WRITERS:
            blocks[rows % shape.hidden >= shape.free, :, :2] = 0
        elif kind == "token_embd":
            blocks[:, :, :2] = np.array([EMBEDDING_SCALE], "<f2").view(np.uint8)
            self._plant_steps(rows - FIRST, blocks)
        elif kind == "output":
            self._plant_steps(rows - FIRST - 1, blocks)

    def _plant_steps(self, steps: NDArray[np.int64], blocks: NDArray[np.uint8]) -> None:
        """Write each step's row as the codes of its row of blocks."""
        own = np.flatnonzero((steps >= 0) & (steps < self._shape.steps))
        codes = self._step_codes[steps[own]].reshape(len(own), self._shape.steps // BLOCK, 2, BLOCK // 2)
        blocks[own, self._shape.free // BLOCK :, 1] &= 127  # the scale's sign
        blocks[own, self._shape.free // BLOCK :, 2:] = codes[:, :, 0] | codes[:, :, 1] << 4
