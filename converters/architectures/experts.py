"""What families with experts share: their keys, and the names of their experts' tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ondevice.converters.architectures.common import Tensors
from ondevice.converters.architectures.config_reader import SAME_REPOSITORY, ConfigReader
from ondevice.converters.architectures.tensors import LayerNames, expert_matrices
from ondevice.converters.checkpoints.base import SourceTensor, StoredTensor
from ondevice.converters.checkpoints.gguf_tensor import QuantizedTensor
from ondevice.converters.checkpoints.mlx_tensor import MlxTensor
from ondevice.converters.checkpoints.views import Matrices, RowsOf
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import MAX_EXPERT_NEURONS, MAX_EXPERTS, ExpertsSpec, ModelConfig


@dataclass(frozen=True)
class ExpertNames:
    """Names of a layer's expert tensors in a checkpoint, after `model.layers.N.`.

    Args:
        gate, up, down: matrices of one expert; `{}` stands for its number. Ungated experts have no `up`.
        router: the router's matrix.
        router_bias: the bias added to its products; empty without one.
        choice_bias: the bias added to scores when experts are chosen; empty without one.
        shared: the dense feed-forward that every token goes through, without the ending `gate_proj.weight`
            and so on.
        shared_gate: the matrix of its gate; empty without one.
        stack: all experts' matrices in folders that MLX has written, without the ending `gate_proj.weight`
            and so on.
    """

    gate: str = "mlp.experts.{}.gate_proj.weight"
    up: str = "mlp.experts.{}.up_proj.weight"
    down: str = "mlp.experts.{}.down_proj.weight"
    router: str = "mlp.gate.weight"
    router_bias: str = ""
    choice_bias: str = ""
    shared: str = ""
    shared_gate: str = ""
    stack: str = "mlp.switch_mlp."

    def merged(self, which: str) -> str:
        """The names of `gate`, `up` or `down` without an expert's number."""
        pattern: str = getattr(self, which)
        return pattern.replace(".{}", "")

    def of(self, *which: str) -> Callable[[int], Sequence[str]]:
        """A function that returns the names of an expert's matrices, given its number."""
        patterns: list[str] = [getattr(self, it) for it in which]
        return lambda expert: [pattern.format(expert) for pattern in patterns]


QWEN_NAMES = ExpertNames()
MIXTRAL_NAMES = ExpertNames(
    gate="block_sparse_moe.experts.{}.w1.weight",
    up="block_sparse_moe.experts.{}.w3.weight",
    down="block_sparse_moe.experts.{}.w2.weight",
    router="block_sparse_moe.gate.weight",
    stack="block_sparse_moe.switch_mlp.",
)


def read_count(reader: ConfigReader, default: int | None = None, *keys: str) -> int:
    """The number of experts, from one of `keys` or several that agree."""
    counts = {key: reader.integer(key) for key in keys if reader.has(key) and not reader.is_null(key)}
    if len(set(counts.values())) > 1:
        raise CheckpointError(f"config.json: {' and '.join(counts)} differ: {list(counts.values())}")
    count = next(iter(counts.values())) if counts else reader.integer(keys[0], default)
    if not 1 <= count <= MAX_EXPERTS:
        raise UnsupportedModelError(
            f"config.json: {next(iter(counts), keys[0])} is {count}; it must be from 1 to {MAX_EXPERTS}"
        )
    return count


def read_shared_neurons(
    reader: ConfigReader, default: int, key: str = "shared_expert_intermediate_size"
) -> int:
    """The number of neurons of the shared expert, which every token goes through. Raises CheckpointError."""
    shared = reader.integer(key, default)
    if not 1 <= shared <= MAX_EXPERT_NEURONS:
        raise CheckpointError(f"config.json: {key} is {shared}; it must be from 1 to {MAX_EXPERT_NEURONS}")
    return shared


def read_shared_experts(reader: ConfigReader, neurons: int) -> int:
    """The number of neurons of all shared experts together, if each has `neurons`. Raises CheckpointError."""
    count = reader.integer("n_shared_experts", 1)
    if not 0 <= count * neurons <= MAX_EXPERT_NEURONS:
        raise CheckpointError(
            f"config.json: n_shared_experts is {count}, of {neurons} neurons; together they may have "
            f"{MAX_EXPERT_NEURONS}"
        )
    return count * neurons


def read_training_keys(reader: ConfigReader) -> None:
    """Read the keys that only training uses, so that they are accepted."""
    reader.boolean("output_router_logits", False)
    reader.number("router_aux_loss_coef", 0.0)


def with_experts(
    config: ModelConfig, experts: ExpertsSpec, sparse: Sequence[bool], shared: int = 0
) -> ModelConfig:
    """`config` with experts in the layers for which `sparse` is true.

    shared: neurons of the dense feed-forward that every token goes through in these layers. Other layers have
    the config's number of neurons. Experts are stored neuron by neuron if their activation makes zeros,
    otherwise as matrices.
    """
    if config.zeros_gates:
        experts = replace(experts, layout="neurons")
    together = experts.num_neurons + shared
    if all(sparse):
        layers = tuple(replace(layer, experts=experts) for layer in config.layers)
        return replace(config, intermediate_size=together, layers=layers)
    layers = tuple(
        replace(layer, experts=experts, feed_forward=replace(layer.feed_forward, neurons=together))
        if has
        else layer
        for layer, has in zip(config.layers, sparse, strict=True)
    )
    return replace(config, layers=layers)


def join_experts(tensors: Tensors, config: ModelConfig, names: ExpertNames = QWEN_NAMES) -> Tensors:
    """The tensors, with experts named as in `tensors.py`: separately if they are stored as matrices,
    otherwise as parts of one feed-forward.

    Raises CheckpointError for missing experts, and for ones of other shapes or of different types.
    """
    for which in ("gate", "up", "down"):
        tensors = unstacked(tensors, config, f"{names.stack}{which}_proj.weight", names.of(which))
    joined = dict(tensors)
    for layer, spec in enumerate(config.layers):
        if spec.experts is None:
            continue
        name, prefix = LayerNames(layer), f"model.layers.{layer}."
        dense = config.dense_neurons(spec)
        for which in expert_matrices(spec):
            ours: str = getattr(name, which)
            pattern = prefix + getattr(names, which)
            sources = [pattern.format(expert) for expert in range(spec.experts.count)]
            if dense:
                sources.insert(0, f"{prefix}{names.shared}{which}_proj.weight")
            widths = [dense] * (dense > 0) + [spec.experts.neurons] * spec.experts.count
            parts = _parts(joined, sources, widths, config.hidden_size, which == "down")
            if spec.experts.layout == "neurons":
                joined[ours] = Matrices(ours, parts, which == "down")
                continue
            part_names = [ours] * (dense > 0) + [name.expert(e, which) for e in range(spec.experts.count)]
            joined |= zip(part_names, parts, strict=True)
            if spec.experts.bias:
                _name_biases(joined, name, pattern, which, spec.experts.count)
        for theirs, new in (
            (names.router, "router"),
            (names.router_bias, "router.bias"),
            (names.choice_bias, "router.choice_bias"),
            (names.shared_gate, "shared_gate"),
        ):
            if theirs and prefix + theirs in joined:
                joined[name.weight(new)] = joined.pop(prefix + theirs)
    return joined


def _name_biases(
    tensors: dict[str, SourceTensor], name: LayerNames, pattern: str, which: str, count: int
) -> None:
    """Rename the biases of the matrices that `pattern` names."""
    bias = pattern.removesuffix("weight") + "bias"
    for expert in range(count):
        if (source := tensors.pop(bias.format(expert), None)) is not None:
            tensors[name.expert_bias(expert, which)] = source


def _parts(
    tensors: dict[str, SourceTensor],
    sources: Sequence[str],
    widths: Sequence[int],
    hidden: int,
    neurons_are_columns: bool,
) -> tuple[SourceTensor, ...]:
    """The matrices `sources`, which are removed from `tensors`, each checked for its shape.

    widths: number of neurons of each. neurons_are_columns: whether neurons are the matrices' columns.
    """
    missing = [source for source in sources if source not in tensors]
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors of experts that config.json asks for are missing, {missing[0]} first; "
            "is the download complete, and does config.json belong to it?"
        )
    parts = tuple(tensors.pop(source) for source in sources)
    for part, width in zip(parts, widths, strict=True):
        wanted = (hidden, width) if neurons_are_columns else (width, hidden)
        if part.shape != wanted or not _have_one_type(part, parts[0]):
            before = ", as they were before they were quantised" if part.code_bits else ""
            raise CheckpointError(
                f"{part.name} has shape {list(part.shape)} and type {part.dtype}; config.json asks for "
                f"{list(wanted)}, and the layer's first expert is {parts[0].dtype}; {SAME_REPOSITORY}{before}"
            )
    return parts


def _have_one_type(part: SourceTensor, other: SourceTensor) -> bool:
    """Whether two parts have the same type of values. Quantised tensors match quantised ones and float32."""
    both = [it.source if isinstance(it, RowsOf) else it for it in (part, other)]
    quantised = (QuantizedTensor, MlxTensor)
    if any(isinstance(it, quantised) for it in both):
        return all(isinstance(it, quantised) or it.dtype == "F32" for it in both)
    return part.dtype == other.dtype


def unstacked(
    tensors: Tensors, config: ModelConfig, name: str, named: Callable[[int], Sequence[str]]
) -> Tensors:
    """The tensors, with each layer's stack `name`, (E, rows, columns), split into one or more matrices an
    expert.

    named: given an expert's number, returns the names, without `model.layers.N.`, of equal parts of its rows,
    in order.

    Raises CheckpointError for another shape, and for experts that the checkpoint also has separately.
    """
    adapted = dict(tensors)
    for layer, spec in enumerate(config.layers):
        prefix = f"model.layers.{layer}."
        stack = None if spec.experts is None else adapted.pop(prefix + name, None)
        if spec.experts is None or stack is None:
            continue
        shape, parts = stack.shape, len(named(0))
        if len(shape) != 3 or shape[0] != spec.experts.count or shape[1] % parts:
            raise CheckpointError(
                f"{stack.name} has shape {list(shape)}; config.json asks for a stack of {spec.experts.count} "
                f"experts; {SAME_REPOSITORY}"
            )
        for expert in range(shape[0]):
            for part, new in enumerate(named(expert)):
                full = prefix + new
                if full in adapted:
                    raise CheckpointError(f"{full} and {stack.name} are the same; {SAME_REPOSITORY}")
                adapted[full] = piece(stack, full, expert * parts + part, shape[0] * parts)
    return adapted


def piece(stack: SourceTensor, name: str, number: int, count: int) -> SourceTensor:
    """Matrix `number` of a stack, which holds `count` matrices of equal size below each other.

    Raises UnsupportedModelError if the stack isn't stored as one tensor of a file.
    """
    if isinstance(stack, MlxTensor):
        return stack.piece(name, number, count)
    if not isinstance(stack, StoredTensor | QuantizedTensor):
        raise UnsupportedModelError(f"{stack.name} is of a format from which stacks aren't read here")
    shape = (stack.shape[0] * stack.shape[1] // count, stack.shape[2])
    return replace(stack, name=name, shape=shape, offset=stack.offset + number * (stack.nbytes // count))
