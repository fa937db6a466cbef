"""Hugging Face folders quantised by MLX: the key `quantization`, and tensors in three parts.

`config.json` gives `group_size`, `bits` and `mode` for all modules, and at a module's name those of this
module, or false if it stays floating-point. A module is quantised exactly if it has `.scales`; config and
shapes must then agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from ondevice.converters.architectures.config_reader import SAME_REPOSITORY
from ondevice.converters.checkpoints.base import SourceTensor, StoredType
from ondevice.converters.checkpoints.mlx_tensor import MlxTensor
from ondevice.converters.checkpoints.safetensors_file import RawTensor, floating
from ondevice.errors import CheckpointError, UnsupportedModelError

KEY, COPY_KEY = "quantization", "quantization_config"
"""The key of `config.json`, and the second key under which MLX repeats it."""
AFFINE, MXFP4 = "affine", "mxfp4"
_DEFAULTS = {AFFINE: (4, 64), MXFP4: (4, 32)}
"""Default bits and group size of each mode, for modules whose entry leaves them out."""
_BITS = {AFFINE: (2, 3, 4, 5, 6, 8), MXFP4: (4,)}
_GROUPS = {AFFINE: (32, 64, 128), MXFP4: (32,)}
UNQUANTISED = "start from the checkpoint before it was quantised"


@dataclass(frozen=True)
class MlxFormat:
    """How a module is quantised: `bits` per weight, in groups of `group` columns."""

    mode: str
    bits: int
    group: int

    def __str__(self) -> str:
        return f"{self.mode} with {self.bits} bits in groups of {self.group}"


@dataclass(frozen=True)
class MlxQuantization:
    """The content of `quantization`. modules: exceptions by module name; None for a floating-point one."""

    default: MlxFormat
    modules: Mapping[str, MlxFormat | None]

    def of(self, module: str) -> MlxFormat | None:
        return self.modules.get(module, self.default)


def read_quantization(values: Mapping[str, Any]) -> MlxQuantization | None:
    """How MLX quantised the weights, as `config.json` says; None if it didn't.

    Raises UnsupportedModelError for quantisation by anything else, and for formats of MLX that this converter
    can't read. Raises CheckpointError for impossible values.
    """
    content, copy = values.get(KEY), values.get(COPY_KEY)
    if isinstance(copy, dict) and copy.get("quant_method"):
        raise UnsupportedModelError(
            f"config.json: {COPY_KEY} is of the method {_shown(copy['quant_method'])}, which can't be "
            f"converted; {UNQUANTISED}"
        )
    if not content:
        if copy:
            raise UnsupportedModelError(
                f"config.json has {COPY_KEY} = {_shown(copy)} without a quant_method, and no {KEY} as MLX "
                f"writes it: how the weights are quantised isn't known; {UNQUANTISED}"
            )
        return None
    quantisation = _parse(content, KEY)
    if copy and _parse(copy, COPY_KEY) != quantisation:
        raise CheckpointError(f"config.json: {KEY} and {COPY_KEY} contradict each other; {SAME_REPOSITORY}")
    return quantisation


def quantized_tensors(
    tensors: Mapping[str, RawTensor], quantisation: MlxQuantization
) -> dict[str, SourceTensor]:
    """The tensors of a folder by name. The parts of each quantised module are joined.

    Raises CheckpointError if a part is missing, or has another type or shape than config.json implies, and if
    nothing is quantised although no module is an exception.
    """
    modules = {name.removesuffix(".scales") for name in tensors if name.endswith(".scales")}
    if not modules and not quantisation.modules:
        raise CheckpointError(
            f"config.json has {KEY}, but no tensor has .scales; {SAME_REPOSITORY}, or remove {KEY} there if "
            "the weights aren't quantised"
        )
    for module, wanted in quantisation.modules.items():
        _check_exception(module, wanted, module in modules, tensors)
    sources: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part == "weight" and tensor.dtype == "U32" and module not in modules:
            raise CheckpointError(
                f"{_cut(name)} is stored as U32, but {_cut(module)}.scales is missing; is the "
                "download complete?"
            )
        if module not in modules or part not in ("weight", "scales", "biases"):
            sources[name] = floating(tensor)
    for module in sorted(modules):
        sources[f"{module}.weight"] = _joined(module, quantisation.of(module), tensors)
    return sources


def _joined(module: str, wanted: MlxFormat | None, tensors: Mapping[str, RawTensor]) -> MlxTensor:
    codes, scales = tensors.get(f"{module}.weight"), tensors[f"{module}.scales"]
    biases = tensors.get(f"{module}.biases")
    if wanted is None:
        raise CheckpointError(
            f"config.json: {KEY} says that {_cut(module)} isn't quantised, but {_cut(scales.name)} is there; "
            f"{SAME_REPOSITORY}"
        )
    if codes is None or (biases is None) != (wanted.mode == MXFP4):
        part = "weight" if codes is None else "biases"
        problem = "has no" if part == "weight" or biases is None else "has"
        raise CheckpointError(
            f"{_cut(module)} {problem} .{part}, though it has .scales and is {wanted}; is the download "
            f"complete? {SAME_REPOSITORY}"
        )
    scale_types = ("U8",) if biases is None else get_args(StoredType)
    for part_tensor, allowed in ((codes, ("U32",)), (scales, scale_types), (biases, get_args(StoredType))):
        if part_tensor is not None and part_tensor.dtype not in allowed:
            raise CheckpointError(
                f"{_cut(part_tensor.name)} is stored as {part_tensor.dtype}; {wanted} has it as "
                f"{', '.join(allowed)}; {SAME_REPOSITORY}"
            )
    _check_shapes(module, wanted, codes, scales, biases)
    return MlxTensor(codes.name, wanted.bits, wanted.group, codes, scales, biases)


def _check_shapes(
    module: str, wanted: MlxFormat, codes: RawTensor, scales: RawTensor, biases: RawTensor | None
) -> None:
    shapes = [part.shape for part in (codes, scales, biases) if part is not None]
    agree = all(len(shape) in (2, 3) and shape[:-1] == codes.shape[:-1] for shape in shapes)
    if not agree or (biases is not None and biases.shape != scales.shape):
        listed = " and ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(
            f"the parts of {_cut(module)} have the shapes {listed}; they must be matrices, or stacks, of as "
            "many rows, and .scales and .biases alike; download the checkpoint again"
        )
    words, groups = codes.shape[-1], scales.shape[-1]
    if 32 * words != wanted.bits * wanted.group * groups:
        raise CheckpointError(
            f"{_cut(codes.name)} has rows of {words} words, and .scales {groups} groups; config.json says "
            f"{wanted}, and {groups} such groups have {wanted.bits * wanted.group * groups} bits, not "
            f"{32 * words}; {SAME_REPOSITORY}"
        )


def _check_exception(
    module: str, wanted: MlxFormat | None, quantised: bool, tensors: Mapping[str, RawTensor]
) -> None:
    """Check an exception in the config. Raises CheckpointError unless it names a module of the folder that is
    quantised as it says.
    """
    if f"{module}.weight" not in tensors:
        raise CheckpointError(
            f"config.json: {KEY} names the module {_cut(module)}, which has no .weight here; "
            f"{SAME_REPOSITORY}"
        )
    if wanted is not None and not quantised:
        raise CheckpointError(
            f"config.json: {KEY} says that {_cut(module)} is {wanted}, but it has no .scales; "
            f"{SAME_REPOSITORY}"
        )


def _parse(content: Any, where: str) -> MlxQuantization:
    if not isinstance(content, dict):
        raise CheckpointError(f"config.json: {where} is {_shown(content)}; it must be an object")
    settings = {key: value for key, value in content.items() if key in ("mode", "bits", "group_size")}
    for key in ("bits", "group_size"):
        if key not in settings:
            raise CheckpointError(f"config.json: {where} has no {key}; {SAME_REPOSITORY}")
    default = _format(settings, where)
    modules: dict[str, MlxFormat | None] = {}
    for module, value in content.items():
        if module in settings:
            continue
        entry = f"{where}.{_cut(module)}"
        if isinstance(value, dict):
            modules[module] = _format(value, entry)
        elif isinstance(value, bool):
            modules[module] = default if value else None
        else:
            raise UnsupportedModelError(
                f"config.json: {entry} is {_shown(value)}; it is no setting known here, and the entry of a "
                f"module is an object, true or false; {UNQUANTISED}"
            )
    return MlxQuantization(default, modules)


def _format(values: Mapping[str, Any], where: str) -> MlxFormat:
    unknown = sorted(set(values) - {"mode", "bits", "group_size"})
    if unknown:
        raise UnsupportedModelError(
            f"config.json: {where} has {_cut(unknown[0])} = {_shown(values[unknown[0]])}, which isn't known "
            f"here; {UNQUANTISED}"
        )
    mode = values.get("mode", AFFINE)
    if not isinstance(mode, str) or mode not in _DEFAULTS:
        raise UnsupportedModelError(
            f"config.json: {where}.mode is {_shown(mode)}; only {AFFINE} and {MXFP4} can be converted; "
            f"{UNQUANTISED}"
        )
    bits, group = (
        _choice(values.get(key, default), allowed[mode], f"{where}.{key}", mode)
        for key, default, allowed in zip(
            ("bits", "group_size"), _DEFAULTS[mode], (_BITS, _GROUPS), strict=True
        )
    )
    return MlxFormat(mode, bits, group)


def _choice(value: Any, allowed: tuple[int, ...], where: str, mode: str) -> int:
    if type(value) is not int or value not in allowed:
        raise UnsupportedModelError(
            f"config.json: {where} is {_shown(value)}; {mode} has {', '.join(map(str, allowed))}; "
            f"{UNQUANTISED}"
        )
    return value


def _shown(value: object) -> str:
    """A value as text for a message. Nested values aren't written out."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return _cut(ascii(value))


def _cut(text: str) -> str:
    shown = text if text.isascii() and text.isprintable() else ascii(text)
    return shown if len(shown) <= 80 else shown[:77] + "..."
