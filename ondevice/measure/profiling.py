"""Profiles a model on a text, and its flash: sparsity, misses of neuron caches, read throughput.

Which neurons fire is known only if gates become exactly zero. For models without such gates only reads are
measured, and `Profile.notes` say why. `plots` does the drawing.

Legend: L layers, T tokens, F neurons of a layer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.api import Model, Name, open_model
from ondevice.backends.base import Float32
from ondevice.bundle.reader import Bundle
from ondevice.callbacks import OnCount, OnProgress, ignore_count, ignore_progress
from ondevice.config import PROFILE_LEAST, PROFILE_TOKENS, RuntimeConfig
from ondevice.errors import UsageError
from ondevice.flash.reader import DEFAULT_THREADS
from ondevice.flash.throughput import Throughput, measure_throughput
from ondevice.records import dataclass
from ondevice.runtime.resolving import ResolvedModel
from ondevice.scoring import benchmark_prompt
from ondevice.sparsity.policies import DEFAULT_POLICY, POLICIES, fires
from ondevice.sparsity.replay import Optimum, hit_rate
from ondevice.training import Text, text_pieces
from ondevice.units import format_bytes

SPANS = 32
"""Most neighbouring tokens whose distinct neurons are counted together."""
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8)
"""Sizes of caches, as shares of all neurons."""
WARM_UP_TOKENS = 64
"""Most tokens that fill the caches and aren't counted. They are at most a quarter of all tokens."""
PROMPTS = (
    "Once upon a time",
    "The most important thing to know about the city is",
    "I'm looking for a restaurant. What do you recommend?",
    "def main():",
)
SAMPLED_PIECE_TOKENS = 256
SAMPLING_TEMPERATURE = 0.8
"""Temperature of the model's own text. Greedy text repeats itself, which would flatter every cache."""
MANY_THREADS = 32
"""Reader threads with which small reads approach the device's full rate."""
LITTLE_BYTES = 256 << 20
"""Size of files below which a device may hold all of them in its cache."""


@dataclass(frozen=True)
class Firing:
    """Mean shares of neurons that fire, by layer, from 0 to 1.

    active: (L,) share of the layer's F that fires for a token. also_before: (L,) share of those that also
    fired for the token before. distinct: (L, S) share of F that fires at least once in windows of 1 to S
    neighbouring tokens; every window size is a mean over the same places in the text.
    """

    active: tuple[float, ...]
    also_before: tuple[float, ...]
    distinct: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class CacheMisses:
    """Miss rates of neuron caches: the share of firing neurons that a cache lacks, from 0 to 1.

    shares: cache sizes, as shares of all neurons; every rate belongs to one of them. policies: rates of the
    runtime's own policies by name, with memory divided among layers as the runtime does. optimum: rates of
    the best possible policy, which knows the future (Belady). warm_up_tokens: number of tokens that weren't
    counted.
    """

    shares: tuple[float, ...]
    policies: dict[str, tuple[float, ...]]
    optimum: tuple[float, ...]
    warm_up_tokens: int


@dataclass(frozen=True)
class Profile:
    """The result of `profile`.

    tokens: length of the text that the model ran over; 0 if it ran over none. firing, misses: None if gates
        are hardly ever zero, and for models with experts.
    notes: sentences on what is missing or doubtful, and why.
    """

    model: str
    text: str
    tokens: int
    num_layers: int
    num_neurons: int
    """Neurons of one layer, the widest."""
    firing: Firing | None
    misses: CacheMisses | None
    reads: Throughput
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The profile as an object for JSON."""
        shown = asdict(self)
        if self.misses is not None:
            shown["misses"]["default_policy"] = DEFAULT_POLICY
        return shown


def profile(
    model: Name | None = None,
    text: Text | None = None,
    *,
    pieces: Sequence[Sequence[int]] | None = None,
    tokens: int = PROFILE_TOKENS,
    on_progress: OnProgress = ignore_progress,
) -> Profile:
    """Measure a model on the first `tokens` tokens of `text`, or on text that the model writes.

    Args:
        model: a path, a name or an alias.
        text: the text to run, if any.
        pieces: token ids instead of a text, each piece read from an empty context.
        tokens: most tokens of the text.
        on_progress: called with the share done, from 0 to 1, and the current step.

    The run holds in memory the weights that every token needs and all gate weights. On disk it takes 4 bytes
    per token and neuron.

    Raises UsageError for too little text, OndeviceError if the disk has no room, and what `load` raises.
    """
    resolved = open_model(model, RuntimeConfig())
    bundle, config = resolved.bundle, resolved.bundle.config
    notes: list[str] = []
    if len(set(config.widths)) > 1:
        notes.append(f"its layers have from {min(config.widths):,} to {config.widest:,} neurons")
    firing = misses = None
    source, total = "none", 0
    if config.experts is not None:
        notes.append(
            f"a token uses {config.experts.chosen} of each layer's {config.experts.count} experts, of "
            f"{config.experts.neurons:,} neurons each; `ondevice train expert-use` counts which, and what "
            "caches of them hit, so no text was run"
        )
    elif config.has_exact_zeros:
        source, pieces = _pieces(resolved, text, pieces, tokens, on_progress)
        total = sum(map(len, pieces))
        with recorded_gates(
            bundle, pieces, lambda done: on_progress(0.3 + 0.2 * done / total, "gates")
        ) as gates:
            firing = firing_of(gates, list(map(len, pieces)))
            misses = cache_misses(gates, lambda done: on_progress(0.5 + 0.4 * done, "caches"))
    else:
        notes.append(
            f"{config.activation} gates are hardly ever exactly zero, so every neuron counts for every token;"
            " there is no sparsity to show, nothing for a cache to choose, and no text was run"
        )
    on_progress(0.9, "reads")
    files = [bundle.expert_file(layer) for layer in config.expert_layers]
    files = files or [bundle.neuron_file(layer) for layer in range(config.num_layers)]
    reads = measure_throughput(files, (DEFAULT_THREADS, MANY_THREADS))
    on_progress(1.0, "done")
    return Profile(
        model=bundle.name,
        text=source,
        tokens=total,
        num_layers=config.num_layers,
        num_neurons=config.widest,
        firing=firing,
        misses=misses,
        reads=reads,
        notes=(*notes, *read_doubts(reads.io, reads.file_bytes), *_read_notes(reads)),
    )


def firing_of(gates: Sequence[Float32], lengths: Sequence[int]) -> Firing:
    """How neurons fire, computed from the gates (T, F) of each layer.

    lengths: number of tokens of each piece of the text, T in all. At least one piece has two or more.
    """
    spans = min(SPANS, max(lengths))
    ends = np.cumsum(lengths).tolist()
    ranges = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    starts = np.concatenate([np.arange(piece.start, piece.stop - spans + 1) for piece in ranges])
    second = np.concatenate([np.arange(piece.start + 1, piece.stop) for piece in ranges])
    active, also_before, distinct = [], [], []
    for layer in gates:
        fired = fires(layer)
        active.append(float(fired.mean()))
        again, counted = fired[second] & fired[second - 1], fired[second]
        also_before.append(int(again.sum()) / max(1, int(counted.sum())))
        distinct.append(_distinct_shares(fired, starts, spans))
    return Firing(tuple(active), tuple(also_before), tuple(distinct))


def cache_misses(
    gates: Sequence[Float32], on_progress: Callable[[float], None] = lambda fraction: None
) -> CacheMisses:
    """The miss rates of caches of all sizes and policies, computed by replaying the gates (T, F) of each
    layer.

    on_progress gets the share done, from 0 to 1.
    """
    warm_up = min(WARM_UP_TOKENS, len(gates[0]) // 4)
    neurons = sum(layer.shape[1] for layer in gates)
    slots = [int(share * neurons) for share in SHARES]
    policies: dict[str, tuple[float, ...]] = {}
    for number, policy in enumerate(POLICIES):
        rates = []
        for index, count in enumerate(slots):
            on_progress((number + index / len(slots)) / (len(POLICIES) + 1))
            rates.append(1 - hit_rate(gates, policy, count, warm_up))
        policies[policy] = tuple(rates)
    on_progress(len(POLICIES) / (len(POLICIES) + 1))
    best = Optimum(gates, warm_up)
    return CacheMisses(SHARES, policies, tuple(1 - best.hit_rate(count) for count in slots), warm_up)


@contextmanager
def recorded_gates(
    bundle: Bundle,
    pieces: Sequence[Sequence[int]],
    on_progress: OnCount = ignore_count,
) -> Iterator[list[Float32]]:
    """A context with each layer's gates (T, F) before the activation, for pieces of token ids, each run from
    an empty context.

    They lie in files on disk that are read as they are used and deleted at the end. on_progress is called
    with the number of tokens done. Raises OndeviceError if the disk has no room, BundleError for a model
    whose gates are hardly ever zero.
    """
    from ondevice.converters.training.activations import check_room, observe_gates
    from ondevice.converters.training.sidecars import check_feed_forwards

    check_feed_forwards(bundle)
    config, tokens = bundle.config, sum(map(len, pieces))
    with tempfile.TemporaryDirectory(prefix="ondevice-gates-") as scratch:
        check_room(Path(scratch), tokens, 4 * config.num_neurons, "gates")
        gates: list[Float32] = [
            np.memmap(Path(scratch) / f"gates-{layer}", np.float32, "w+", shape=(tokens, neurons))
            for layer, neurons in enumerate(config.widths)
        ]
        written = [0] * config.num_layers

        def observe(layer: int, x: Float32, values: Float32) -> None:
            start = written[layer]
            gates[layer][start : start + len(values)] = values
            written[layer] += len(values)

        observe_gates(bundle, pieces, observe, on_progress)
        yield gates


def _distinct_shares(fired: NDArray[np.bool_], starts: NDArray[np.intp], spans: int) -> tuple[float, ...]:
    """Mean share of neurons that fire in windows of 1 to `spans` tokens that begin at `starts`.

    fired: (T, F), True where a neuron fires.
    """
    united = np.zeros((len(starts), fired.shape[1]), dtype=np.bool_)
    shares = []
    for later in range(spans):
        united |= fired[starts + later]
        shares.append(float(united.mean()))
    return tuple(shares)


def _pieces(
    resolved: ResolvedModel,
    text: Text | None,
    pieces: Sequence[Sequence[int]] | None,
    tokens: int,
    on_progress: OnProgress,
) -> tuple[str, Sequence[Sequence[int]]]:
    """A description in words of the text to run, and its pieces."""
    if text is not None and pieces is not None:
        raise UsageError("give either a text or pieces of token ids")
    if tokens < PROFILE_LEAST:
        raise UsageError(f"tokens is {tokens}; it must be {PROFILE_LEAST} or more")
    if text is None and pieces is None:
        return _sampled_text(resolved, tokens, lambda done: on_progress(0.3 * done / tokens, "writing text"))
    read_pieces = (
        text_pieces(resolved, text, tokens) if text is not None else [list(p) for p in pieces or () if p]
    )
    total = sum(map(len, read_pieces))
    if total < PROFILE_LEAST:
        raise UsageError(f"the text has {total} tokens; a profile takes {PROFILE_LEAST} or more")
    return "the text given", read_pieces


def _sampled_text(resolved: ResolvedModel, tokens: int, on_progress: OnCount) -> tuple[str, list[list[int]]]:
    """A description in words, and pieces of text: fixed prompts, and what the model samples to continue them.

    The pieces have `tokens` tokens in all.
    """
    config = resolved.bundle.config
    length = min(SAMPLED_PIECE_TOKENS, resolved.plan.max_context)
    if resolved.tokenizer is None:
        prompts, named = [benchmark_prompt(8, config.vocab_size)], "made-up token ids"
    else:
        prompts = [resolved.tokenizer.encode(prompt) for prompt in PROMPTS]
        named = ", ".join(f'"{prompt}"' for prompt in PROMPTS)
    pieces: list[list[int]] = []
    done = 0
    with Model(resolved) as model:
        while done < tokens:
            seed = len(pieces)
            prompt = prompts[seed % len(prompts)][: max(1, length // 2)]
            most = min(length, tokens - done)
            response = model.generate(
                tokens=prompt,
                max_tokens=max(0, most - len(prompt)),
                temperature=SAMPLING_TEMPERATURE,
                seed=seed,
            )
            pieces.append([*prompt, *response.tokens][:most])
            done += len(pieces[-1])
            on_progress(done)
    return f"the model's own at temperature {SAMPLING_TEMPERATURE}, continuing {named}", pieces


def read_doubts(io: str, file_bytes: int) -> list[str]:
    """Notes on why measured read rates may say little about flash. file_bytes: size of all files read."""
    notes = []
    if io == "buffered":
        notes.append(
            "reads went through the page cache, as the file system refuses direct ones or --io says so: they "
            "may say more of memory than of flash"
        )
    if file_bytes < LITTLE_BYTES:
        notes.append(
            f"the files read have {format_bytes(file_bytes)} in all, which the device may hold in "
            "memory of its own: a large model's reads may be slower"
        )
    return notes


def _read_notes(reads: Throughput) -> list[str]:
    notes = []
    missing = sorted({rate.read_bytes for rate in reads.rates if rate.bytes_per_second is None})
    if missing:
        listed = ", ".join(f"{nbytes >> 10} KiB" for nbytes in missing)
        notes.append(
            f"no reads of {listed}: that is less than what a checksum covers, or more than a file of the "
            "feed-forward has"
        )
    return notes
