"""Frozen configuration: how a model is stored, how it runs, how it samples.

Each option has its one default here; the CLI and the API read them from these classes.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, cast, get_args, get_origin, get_type_hints

from ondevice.constraints.constraint import Constraint
from ondevice.errors import UsageError
from ondevice.model_config import MAX_CHOSEN
from ondevice.records import dataclass

BackendName = Literal["auto", "cpu", "mlx", "reference"]
Sparsity = Literal["auto", "dense", "exact", "predicted", "experts"]
SELECTING: tuple[Sparsity, ...] = ("exact", "predicted")
"""Modes in which only some of a layer's neurons are multiplied for a token."""
Speculation = Literal[
    "auto", "off", "streams", "resident", "recycling", "lookup", "ngrams", "model", "eagle", "dflash", "mtp"
]
WhenFull = Literal["drop", "stop"]
"""What a full conversation does: `drop` forgets its oldest turns, `stop` refuses the next one."""
GROUP_SIZE = 64
MAX_STREAMS = 4
"""Most streams of a token."""
TRAIN_TOKENS = 40_000
"""Most tokens of a text that training uses by default."""
NGRAM_TOKENS = 1_000_000
"""Most tokens of a text that a datastore of continuations holds by default."""
EXPERT_TOKENS = 8192
"""Most tokens of a text on which the use of experts is counted by default."""
PROFILE_TOKENS = 1024
"""Most tokens of a text that a profile uses by default."""
PROFILE_LEAST = 16
"""Fewest tokens that a profile takes."""
TARGET_RANGE = "above 0 and below 1"
"""Allowed range of the target recall of predictors, both in a bundle and as an option."""


def is_target(share: float) -> bool:
    """True if `share` lies in TARGET_RANGE."""
    return 0.0 < share < 1.0


Bits: TypeAlias = Literal[4, 5, 6, 8, 16]
"""Bits of a weight's code that a model may be rounded to; 16 are a float16 value."""
CodeBits: TypeAlias = Literal[2, 3, 4, 5, 6, 8, 16]
"""Bits of a weight's code."""
GroupSize: TypeAlias = Literal[16, 32, 64]
Scales: TypeAlias = Literal[
    "affine", "symmetric", "mxfp4", "table", "two_level", "two_level_symmetric", "two_level_table"
]
"""How a code q becomes a weight, with `zero` = 2^(bits - 1) and a table of 16 integers:

- `affine`: `scale * q + bias`; at 16 bits, the float16 value
- `symmetric`: `scale * (q - zero)`
- `mxfp4`: `scale * e2m1(q)`, with powers of two as scales
- `table`: `scale * table[q]`
- `two_level`: `d * s * q - dmin * m`, with d and dmin of 256 elements and integers s and m of each group
- `two_level_symmetric`: `d * s * (q - zero)`
- `two_level_table`: `d * s * table[q]`
"""
SUPER_SIZE = 256
"""Elements that share the upper one of two levels of scales."""


class RowFormat(NamedTuple):
    """How rows of weights are stored.

    group_size: elements that share a scale and, if there is one, a bias or minimum. 16 bits have neither.
    """

    bits: CodeBits = 4
    group_size: GroupSize = 64
    scales: Scales = "affine"

    @property
    def has_biases(self) -> bool:
        """True if a float16 bias is stored with each scale."""
        return self.bits != 16 and self.scales == "affine"

    @property
    def implied_bias(self) -> bool:
        """True if each group has a bias that isn't stored but follows from the scale: `-zero * scale`."""
        return self.scales == "symmetric"

    @property
    def mxfp4(self) -> bool:
        return self.scales == "mxfp4"

    @property
    def two_levels(self) -> bool:
        """True if scales have two levels. Columns are then a multiple of 256."""
        return self.scales.startswith("two_level")

    @property
    def tiles_only(self) -> bool:
        """True if only matrices that are stored as tiles may have the format."""
        return self.two_levels or self.scales == "table"

    @property
    def zero(self) -> int:
        """The code that stands for the weight 0 with symmetric scales of one or two levels."""
        return 1 << (self.bits - 1)

    @property
    def low_bits(self) -> int:
        """Bits of a code in the low plane of slices; 0 if codes aren't divided."""
        return {4: 2, 5: 2, 6: 4, 8: 4}.get(self.bits, 0)

    @property
    def upper_bytes(self) -> int:
        """Bytes of the upper level of scales for 256 elements: d, and dmin if there is one."""
        return 4 if self.scales == "two_level" else 2

    @property
    def header_bytes(self) -> int:
        """Bytes of both levels of scales for 256 elements: `upper_bytes`, and the scales of the groups."""
        shared = self.bits == 3 or (self.scales == "two_level" and self.bits > 2)
        return self.upper_bytes + SUPER_SIZE // 64 * (3 if shared else 64 // self.group_size)


MXFP4 = RowFormat(4, 32, "mxfp4")
"""4-bit floats (E2M1) in groups of 32, whose scales are powers of two in a byte each (E8M0)."""
TILE_FORMATS: tuple[RowFormat, ...] = (
    RowFormat(2, 16, "two_level"),
    RowFormat(3, 16, "two_level_symmetric"),
    RowFormat(4, 32, "two_level"),
    RowFormat(5, 32, "two_level"),
    RowFormat(6, 16, "two_level_symmetric"),
    RowFormat(4, 32, "table"),
    RowFormat(4, 32, "two_level_table"),
)
"""Formats that only tiles have. GGUF calls them Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL and IQ4_XS."""

MatrixKind = Literal["qkv", "out", "head", "embedding", "feed_forward", "down", "experts", "experts_down"]
"""Kinds of matrices. `qkv`: the parts of a layer's fused projection; `feed_forward`: neurons' gate and up
rows; `down`: the down matrices of feed-forwards in slices; `experts`: the gate and up matrices of experts
that are stored as matrices; `experts_down`: their down matrices. A tied head is an `embedding`."""
MATRIX_KINDS: tuple[MatrixKind, ...] = get_args(MatrixKind)


def matrix_name(kind: MatrixKind, layer: int | None = None, part: str = "") -> str:
    """The manifest's name for matrices of a kind, in all layers or one, and for all parts of `qkv` or one.

    Examples are `qkv`, `layers.3.qkv`, `qkv.v` and `layers.3.qkv.v`. Parts are those of
    `ModelConfig.projection_sizes`.
    """
    return ("" if layer is None else f"layers.{layer}.") + kind + (f".{part}" if part else "")


def format_order(name: str) -> tuple[int, int, str]:
    """The sort key of a `matrix_name`: names for all layers first, then by layer; within these by kind, then
    by part.
    """
    *layer, rest = name.removeprefix("layers.").split(".", 1) if name.startswith("layers.") else (name,)
    kind, _, part = rest.partition(".")
    return int(layer[0]) if layer else -1, MATRIX_KINDS.index(cast(MatrixKind, kind)), part


@dataclass(frozen=True)
class QuantConfig:
    """How a model's weights are stored: with `bits` bits in groups of 64, except for `formats`.

    formats: the formats of other matrices, by `matrix_name`, in `format_order`; none at 16 bits. Gate and up
    rows of neurons with separate records have `bits` bits too. Down rows always have them, in groups of 64.
    """

    bits: Bits = 4
    formats: tuple[tuple[str, RowFormat], ...] = ()

    def of(self, kind: MatrixKind, layer: int | None = None, part: str = "") -> RowFormat:
        """The format of a matrix: that of its most specific name. A name with the layer is more specific than
        one with the part.
        """
        names = (kind, layer, part), (kind, layer, ""), (kind, None, part), (kind, None, "")
        formats = (self._by_name.get(matrix_name(*name)) for name in names)
        return next((stored for stored in formats if stored is not None), self.plain)

    def formats_of(self, kind: MatrixKind) -> tuple[RowFormat, ...]:
        """The formats that matrices of a kind have in any layer or part. The general format comes first."""
        named = (stored for name, stored in self.formats if kind in name.split("."))
        return tuple(dict.fromkeys((self.of(kind), *named)))

    def layer_formats(self, layer: int) -> tuple[tuple[str, RowFormat], ...]:
        """The formats that are set for one layer, each with its name without the layer."""
        prefix = f"layers.{layer}."
        return tuple(
            (name.removeprefix(prefix), stored) for name, stored in self.formats if name.startswith(prefix)
        )

    @cached_property
    def _by_name(self) -> dict[str, RowFormat]:
        return dict(self.formats)

    def head(self, tied: bool) -> RowFormat:
        """The format of the output head. tied: whether the head is the embedding table."""
        return self.of("embedding" if tied else "head")

    @property
    def plain(self) -> RowFormat:
        """The format of matrices that `formats` doesn't name, and of neurons' down rows."""
        return RowFormat(self.bits)

    @property
    def name(self) -> str:
        return "f16" if self.bits == 16 else f"q{self.bits}"

    @staticmethod
    def parse(name: str) -> QuantConfig:
        """`q4`, `q5`, `q6`, `q8` or `f16`. Raises UsageError on anything else."""
        for bits in get_args(Bits):
            config = QuantConfig(bits)
            if config.name == name:
                return config
        raise UsageError(f"quantisation {name!r} is not one of q4, q5, q6, q8, f16, auto")


AUTO_QUANT = "auto"
"""The quantisation that fits a checkpoint: that of its codes, or q4 for floating-point weights."""

MAX_THREADS = 256
"""Most compute threads. A larger number is probably a mistake, and each thread takes memory."""
MAX_CONTEXT = 1 << 24
"""Most tokens of a prompt or conversation."""
MAX_PREFILL_CHUNK = 1 << 16
"""Most prompt tokens per forward pass."""
MAX_PARALLEL = 16
"""Most texts that share forward passes: the most rows of a decode pass."""
MAX_PASS_SECONDS = 60.0
"""Most seconds for `pass_seconds`."""


class RuntimeOptions(TypedDict, total=False):
    """Keyword options of `load` and `inspect`: the fields of RuntimeConfig, which holds their defaults."""

    dram_budget: str | int
    memory_pressure: Literal["auto", "off"]
    backend: BackendName
    threads: int
    io: Literal["auto", "direct", "buffered"]
    sparsity: Sparsity
    predictor_recall: float
    experts: int
    speculation: Speculation
    draft_model: str | os.PathLike[str]
    kv_bits: Literal[16, 8]
    max_context: int
    context_share: float
    prefill_chunk: int
    parallel: int
    pass_seconds: float
    kernel_target: Literal["auto", "scalar", "avx2", "avxvnni", "avx512", "amx", "neon", "i8mm"]
    prompt_cache: str | os.PathLike[str]
    prompt_cache_bytes: str | int
    chat_template: str | os.PathLike[str]
    date: str


@dataclass(frozen=True)
class RuntimeConfig:
    """How a bundle is run. Only `kv_bits`, `backend`, `experts` and a lossy `sparsity` change the text.

    The context is `max_context`, or the shorter one that the budget has room for. A full context ends the
    text, or makes a chat forget its oldest turns.
    """

    dram_budget: str | int = "auto"
    memory_pressure: Literal["auto", "off"] = "auto"
    """auto: the budget shrinks while other programs need the memory, and grows back afterwards."""
    backend: BackendName = "auto"
    threads: int = 0
    """Compute threads; 0 means one per core the process may use."""
    io: Literal["auto", "direct", "buffered"] = "auto"
    sparsity: Sparsity = "auto"
    predictor_recall: float = 0.95
    """Share of the firing neurons that `predicted` aims to find; one of the values measured in the bundle."""
    experts: int = 0
    """Experts that each token chooses in a layer. Fewer than the model's change the text. 0 means the
    model's."""
    speculation: Speculation = "auto"
    draft_model: str | os.PathLike[str] = ""
    """Bundle that drafts with `speculation="model"`. Naming one makes `auto` mean `model`."""
    kv_bits: Literal[16, 8] = 16
    max_context: int = 0
    """Most tokens of a session. 0 means the smaller of 4,096 and the model's own limit. If the budget has no
    room for that, 0 means as many as fit, down to 512."""
    context_share: float = 0.0
    """Share of the budget that keys and values of a context beyond the default may take if `max_context` is
    0, up to the model's limit. It changes no mode. Of the budget `auto` it is the share of what is planned,
    and no more bytes than the weights have. 0: no longer context."""
    prefill_chunk: int = 0
    """Prompt tokens per forward pass. Fixed, so that memory pressure can't change it. 0 means 256, or 512 for
    a model with experts, as a pass reads each expert once."""
    parallel: int = 1
    """Most generations that run at once and share forward passes. It is 1 on a backend whose rows depend on
    the other rows of a pass, as a text would then depend on other texts."""
    pass_seconds: float = 0.5
    """Most seconds of a forward pass over prompts of more than 32 tokens, as other generations wait for it.
    It has an effect with `parallel` above 1 if all weights are in memory and none are of experts; it never
    changes the text. 0 means no limit."""
    kernel_target: Literal["auto", "scalar", "avx2", "avxvnni", "avx512", "amx", "neon", "i8mm"] = "auto"
    prompt_cache: str | os.PathLike[str] = ""
    """Folder that keeps the state of texts, so that later texts that begin alike needn't compute it. Empty:
    none is kept."""
    prompt_cache_bytes: str | int = "10GB"
    """Most bytes of all files in `prompt_cache`. The least recently used ones go first."""
    chat_template: str | os.PathLike[str] = ""
    """File with a Jinja template that replaces the model's. Empty: the model's."""
    date: str = ""
    """Day that chat templates use as today, as YYYY-MM-DD. Empty: today."""

    def __post_init__(self) -> None:
        """Check all values. Raises UsageError for one of the wrong type or out of range."""
        for name, allowed in _runtime_choices().items():
            value = getattr(self, name)
            if not any(type(value) is type(choice) and value == choice for choice in allowed):
                raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(map(str, allowed))}")
        for name, (least, most) in _RUNTIME_LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise UsageError(f"{name} is {value!r}; it must be an integer from {least} to {most}")
        if not _is_number(self.pass_seconds) or not 0.0 <= self.pass_seconds <= MAX_PASS_SECONDS:
            raise UsageError(
                f"pass_seconds is {self.pass_seconds!r}; it must be a number from 0 to {MAX_PASS_SECONDS:g}"
            )
        if not _is_number(self.predictor_recall) or not is_target(self.predictor_recall):
            raise UsageError(
                f"predictor_recall is {self.predictor_recall!r}; it must be a number {TARGET_RANGE}, one of "
                "those that `ondevice inspect` lists for the model"
            )
        if not _is_number(self.context_share) or not 0.0 <= self.context_share <= 1.0:
            raise UsageError(f"context_share is {self.context_share!r}; it must be a number from 0 to 1")
        if not isinstance(self.dram_budget, str) and not _is_int(self.dram_budget):
            raise UsageError(f"dram_budget is {self.dram_budget!r}; it must be a string or a number of bytes")
        if not isinstance(self.draft_model, str | os.PathLike):
            raise UsageError(f"draft_model is {self.draft_model!r}; it must be a path or a name")
        if not isinstance(self.chat_template, str | os.PathLike) or not _is_path(self.chat_template):
            raise UsageError(f"chat_template is {self.chat_template!r}; it must be a file's path")
        if not isinstance(self.date, str):
            raise UsageError(f"date is {self.date!r}; it must be a day, such as 2026-07-31")
        _ = self.day
        if not isinstance(self.prompt_cache, str | os.PathLike) or not _is_path(self.prompt_cache):
            raise UsageError(f"prompt_cache is {self.prompt_cache!r}; it must be a folder's path")
        if not isinstance(self.prompt_cache_bytes, str) and not _is_int(self.prompt_cache_bytes):
            raise UsageError(
                f"prompt_cache_bytes is {self.prompt_cache_bytes!r}; it must be a string or a number of bytes"
            )

    @property
    def day(self) -> datetime.date | None:
        """The day that chat templates use as today; None for the current day. Raises UsageError."""
        if not self.date:
            return None
        try:
            if len(self.date) == len("2026-07-31"):
                return datetime.date.fromisoformat(self.date)
        except ValueError:
            pass
        raise UsageError(f"date is {self.date!r}; it must be a day, such as 2026-07-31")


def _is_path(value: str | os.PathLike[str]) -> bool:
    """True if the system can look the path up."""
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


_RUNTIME_LIMITS = {
    "threads": (0, MAX_THREADS),
    "experts": (0, MAX_CHOSEN),
    "max_context": (0, MAX_CONTEXT),
    "prefill_chunk": (0, MAX_PREFILL_CHUNK),
    "parallel": (1, MAX_PARALLEL),
}


@cache
def _runtime_choices() -> dict[str, tuple[Any, ...]]:
    """Allowed values of each RuntimeConfig field that has a fixed set of them."""
    hints = get_type_hints(RuntimeConfig)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


MIN_TEMPERATURE = 1e-6
"""Lowest temperature above 0. No finite logit divided by it overflows."""
MAX_TOP_LOGPROBS = 20
"""Most tokens whose log-probabilities a generation gives in addition to each token's."""
MAX_BIAS = 1e9
"""Largest finite bias of a logit. It exceeds the spread of any model's logits, and nothing overflows."""


class SamplingOptions(TypedDict, total=False):
    """Keyword options of every generation: the fields of SamplingConfig, which holds their defaults.

    `stop` and `logit_bias` accept more types here than in SamplingConfig.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    repeat_last_n: int
    seed: int | None
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]]
    stop: str | Iterable[str]
    end_tokens: Iterable[int]
    max_tokens: int
    top_logprobs: int | None
    constraint: Constraint | None


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen from the logits. The defaults are greedy decoding."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that it occurs after the prompt."""
    presence_penalty: float = 0.0
    """Taken once from the logit of each token that occurs after the prompt."""
    repeat_last_n: int = -1
    """Number of newest tokens, prompt included, that all penalties look at; -1: all, 0: none."""
    seed: int | None = None
    """Seed of the random numbers. With None, `seeded` draws one."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs (token id, bias added to its logit). A bias of -inf bans the token."""
    stop: tuple[str, ...] = field(default=())
    end_tokens: tuple[int, ...] = ()
    """Token ids that end the text, besides the model's end-of-text tokens. They aren't part of it."""
    max_tokens: int = 256
    top_logprobs: int | None = None
    """Number of likeliest tokens whose log-probabilities each event has besides its token's. None: events
    have no log-probabilities."""
    constraint: Constraint | None = None
    """What the text, or the reply in a conversation, has to obey. None: nothing."""

    def __post_init__(self) -> None:
        """Check all values. Raises UsageError for one of the wrong type or out of range."""
        self._check_types()
        checks = (
            (
                "temperature",
                self.temperature == 0.0 or MIN_TEMPERATURE <= self.temperature <= 100.0,
                "0, or 1e-6 to 100",
            ),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            ("repetition_penalty", 1e-3 <= self.repetition_penalty <= 100.0, "from 0.001 to 100"),
            *((name, abs(getattr(self, name)) <= 2.0, "from -2 to 2") for name in _COUNT_PENALTIES),
            ("repeat_last_n", self.repeat_last_n >= -1, "0 (none), or more, or -1 (all)"),
            ("max_tokens", self.max_tokens >= 0, "0 or more"),
            ("seed", self.seed is None or 0 <= self.seed < 1 << 64, "from 0 to 2^64 - 1"),
            (
                "top_logprobs",
                self.top_logprobs is None or 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS,
                f"from 0 to {MAX_TOP_LOGPROBS}",
            ),
            # An empty string would stop every text before it begins.
            ("stop", all(self.stop), "strings that aren't empty"),
        )
        for name, valid, range_text in checks:
            if not valid:
                raise UsageError(f"{name} is {getattr(self, name)!r}; it must be {range_text}")
        for token, bias in self.logit_bias:
            if not (bias == -math.inf or abs(bias) <= MAX_BIAS):
                shown = bias if isinstance(bias, float) else f"an integer of {bias.bit_length()} bits"
                raise UsageError(
                    f"the logit_bias of token {token} is {shown}; it must be a number from -{MAX_BIAS:g} to "
                    f"{MAX_BIAS:g}, or -inf, which bans the token"
                )

    @property
    def is_random(self) -> bool:
        """True if tokens are drawn at random, so that the seed matters."""
        return self.temperature > 0.0

    @property
    def counts_tokens(self) -> bool:
        """True if logits depend on how often tokens occur after the prompt."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def penalises(self) -> bool:
        """True if logits depend on earlier tokens by some penalty."""
        return self.repeat_last_n != 0 and (self.repetition_penalty != 1.0 or self.counts_tokens)

    def seeded(self) -> SamplingConfig:
        """This config with a seed: if it samples at random and has none, one below 2^32 drawn at random."""
        if self.seed is not None or not self.is_random:
            return self
        return replace(self, seed=int.from_bytes(os.urandom(4)))

    def _check_types(self) -> None:
        pairs = isinstance(self.logit_bias, tuple) and all(
            isinstance(pair, tuple) and len(pair) == 2 and _is_int(pair[0]) and _is_number(pair[1])
            for pair in self.logit_bias
        )
        strings = isinstance(self.stop, tuple) and all(isinstance(text, str) for text in self.stop)
        ids = isinstance(self.end_tokens, tuple) and all(map(_is_int, self.end_tokens))
        checks = (
            *((name, _is_int(getattr(self, name)), "an integer") for name in _SAMPLING_INTEGERS),
            ("seed", self.seed is None or _is_int(self.seed), "an integer, or None to have one drawn"),
            ("top_logprobs", self.top_logprobs is None or _is_int(self.top_logprobs), "an integer, or None"),
            *((name, _is_number(getattr(self, name)), "a number") for name in _SAMPLING_NUMBERS),
            ("logit_bias", pairs, "a tuple of pairs of a token id and a number"),
            ("stop", strings, "a tuple of strings"),
            ("end_tokens", ids, "a tuple of token ids"),
            (
                "constraint",
                self.constraint is None or isinstance(self.constraint, Constraint),
                "a Constraint, or None",
            ),
        )
        for name, valid, type_text in checks:
            if not valid:
                raise UsageError(f"{name} is {getattr(self, name)!r}; it must be {type_text}")


_SAMPLING_INTEGERS = ("top_k", "max_tokens", "repeat_last_n")
_COUNT_PENALTIES = ("frequency_penalty", "presence_penalty")
_SAMPLING_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", *_COUNT_PENALTIES)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_int(value)
