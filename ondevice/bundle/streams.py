"""`streams.json` and `streams.safetensors`: adapters that draft the tokens after the next one.

They are the streams of "Speculative Streaming" (arXiv 2402.11131): extra rows of a token, with low-rank
adapters in the last layers. A sidecar (`sidecar.py`) of a finished bundle; `weights/README.md` is the
specification.

Legend: D hidden size, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Literal, get_args

from ondevice.bundle.file_layouts import TensorSpec, linear_tensors, tensors_layout
from ondevice.bundle.manifest import Manifest
from ondevice.bundle.sidecar import (
    BITS,
    CRCS,
    SHA256,
    TOKENS,
    Sidecar,
    check_sidecar,
    parse_sidecar,
    part_rule,
    sidecar_text,
)
from ondevice.bundle.strict_json import Section
from ondevice.config import GROUP_SIZE, MAX_STREAMS, RowFormat
from ondevice.errors import BundleError
from ondevice.model_config import ModelConfig
from ondevice.records import dataclass

STREAMS = "streams.safetensors"
STREAMS_MANIFEST = "streams.json"
STREAMS_SIDECAR = Sidecar(
    "streams",
    STREAMS_MANIFEST,
    STREAMS,
    "ondevice train streams --model {model} --text FILE --mode lossless",
    "every --speculation but `streams`",
    {"version": 2, "group_size": GROUP_SIZE},
)
_LOSSLESS = re.compile(rb'"mode"\s*:\s*"lossless"')
MAX_ADAPTER_RANK = 1024
EMBEDDINGS = "embeddings"

MultiStreamMode = Literal["lossless", "shared"]


@dataclass(frozen=True)
class MultiStreams:
    """The stream adapters of one model.

    model: `weights_digest` of the weights that they belong to.
    mode: `shared` if they also apply to the text's own tokens, which makes another model; else `lossless`.
    bits: width of the matrices' codes.
    streams: number of streams of a token.
    first_layer: the first layer with adapters; all later layers have them too.
    trained_tokens, measured_tokens: lengths of the texts.
    acceptance: acceptance rate of each stream: the share of measured tokens that it drafts right if all
        streams before it do.
    crcs: CRC32C of each MiB of the file with the tensors.
    begins: whether streams enter in `first_layer`, with their embeddings. If False, they either come with the
        tokens from a slice of earlier layers, or enter in a later slice, and then `first_layer` is after
        these layers.
    part_of: in a slice, the `parts.sidecar_digest` of the complete model's streams.
    """

    model: str
    mode: MultiStreamMode
    bits: Literal[4, 8, 16]
    streams: int
    first_layer: int
    attention_rank: int
    feed_forward_rank: int
    trained_tokens: int
    measured_tokens: int
    acceptance: tuple[float, ...]
    sha256: str
    crcs: tuple[int, ...]
    begins: bool = True
    part_of: str = ""

    def layers(self, config: ModelConfig) -> range:
        """The layers that have adapters."""
        return range(self.first_layer, config.num_layers)

    def matrices(self, config: ModelConfig) -> dict[str, tuple[int, int]]:
        """Logical (rows, columns) of every matrix by name, in the order of the file."""
        hidden, rank = config.hidden_size, self.attention_rank
        matrices: dict[str, tuple[int, int]] = {}
        for prefix in map(layer_prefix, self.layers(config)):
            matrices |= _low_rank(f"{prefix}.qkv", hidden, rank, config.qkv_size)
            matrices |= _low_rank(f"{prefix}.out", config.query_size, rank, hidden)
            matrices |= _low_rank(f"{prefix}.feed_forward", hidden, self.feed_forward_rank, hidden)
        return matrices

    def adapter_parameters(self, config: ModelConfig) -> int:
        """Number of logical parameters of the adapters in all stream layers."""
        return sum(rows * cols for rows, cols in self.matrices(config).values())

    def embedding_parameters(self, config: ModelConfig) -> int:
        """Number of logical parameters of the stream embeddings."""
        return self.streams * config.hidden_size


def medusa_parameters(config: ModelConfig, heads: int) -> int:
    """Number of parameters of Medusa's heads (arXiv 2401.10774). Each has a (D, D) block and a (V,
    D) output.
    """
    return heads * config.hidden_size * (config.hidden_size + config.vocab_size)


def layer_prefix(layer: int) -> str:
    """The prefix of the names of a layer's tensors."""
    return f"layers.{layer}"


def _low_rank(name: str, cols: int, rank: int, rows: int) -> dict[str, tuple[int, int]]:
    """Shapes of the two matrices that map `cols` values to `rows` through `rank`, by name."""
    return {f"{name}.down": (rank, cols), f"{name}.up": (rows, rank)}


def stream_tensors(config: ModelConfig, streams: MultiStreams) -> Mapping[str, TensorSpec]:
    """The exact tensors of the file, in the order of their bytes: embeddings, adapters by layer."""
    tensors: dict[str, TensorSpec] = {}
    if streams.begins:
        tensors[EMBEDDINGS] = TensorSpec("F32", (streams.streams, config.hidden_size))
    for name, (rows, cols) in streams.matrices(config).items():
        tensors |= linear_tensors(name, rows, cols, RowFormat(streams.bits))
    return tensors


def streams_text(streams: MultiStreams) -> bytes:
    """The bytes of `streams.json`."""
    content = {**STREAMS_SIDECAR.facts, **asdict(streams)}
    if streams.begins:
        del content["begins"]
    return sidecar_text(STREAMS_SIDECAR, content)


def says_lossless(data: bytes) -> bool:
    """Whether a `streams.json`, even a damaged one, has mode `lossless`: the model then works without its
    streams.

    Damage is very unlikely to turn the other mode into this one, and whoever tampers could delete the file as
    well.
    """
    return _LOSSLESS.search(data) is not None


def check_streams(streams: MultiStreams, config: ModelConfig) -> None:
    """Check streams for this model. Raises BundleError for a value that `streams.json` can't have."""
    _parse(parse_sidecar(STREAMS_SIDECAR, streams_text(streams)), config)


def parse_streams(data: bytes, manifest: Manifest) -> MultiStreams:
    """The parsed `streams.json`. Raises BundleError if damaged, out of range, or made for other weights."""
    streams = _parse(parse_sidecar(STREAMS_SIDECAR, data), manifest.config)
    layout = tensors_layout(stream_tensors(manifest.config, streams))
    check_sidecar(STREAMS_SIDECAR, manifest, streams.model, layout, streams.crcs)
    return streams


def _parse(section: Section, config: ModelConfig) -> MultiStreams:
    rules = {
        "model": SHA256,
        "mode": (Section.one_of, get_args(MultiStreamMode)),
        "bits": BITS,
        "streams": (Section.integer, 1, MAX_STREAMS),
        "first_layer": (Section.integer, 0, (config.part.layers or config.num_layers) - 1),
        **dict.fromkeys(("attention_rank", "feed_forward_rank"), (Section.integer, 1, MAX_ADAPTER_RANK)),
        "trained_tokens": TOKENS,
        "measured_tokens": TOKENS,
        "acceptance": (Section.numbers, MAX_STREAMS, 0.0, 1.0),
        "sha256": SHA256,
        "crcs": CRCS,
        **part_rule(config),
    }
    streams = MultiStreams(**section.values(rules, {"begins": (Section.boolean,)}))
    _check_place(streams, config)
    if len(streams.acceptance) != streams.streams:
        raise BundleError(
            f"streams.acceptance has {len(streams.acceptance)} values for {streams.streams} streams"
        )
    return streams


def _check_place(streams: MultiStreams, config: ModelConfig) -> None:
    """Check where streams enter. Raises BundleError unless it is one of these layers, or in another part."""
    first, num_layers = streams.first_layer, config.num_layers
    if streams.begins and first >= num_layers:
        raise BundleError(f"streams.first_layer is {first}; the last of these layers is {num_layers - 1}")
    if streams.begins or first >= num_layers:
        return
    if first or not config.part.first:
        raise BundleError(
            "streams.begins is false, which it is in slices of later layers, with adapters from the first "
            "on, and in slices of earlier ones"
        )
