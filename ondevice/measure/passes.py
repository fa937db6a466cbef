"""Measures how the time of forward passes divides: a prompt's, a token's, and a draft's with only the weights
in memory.

The kernels count the time of their steps while that is switched on (`kernels/step_times.h`). The remaining
time of a pass is Python's, or a wait for flash. Passes are those of the decode loop, so the loop's time
counts as Python's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from ondevice.api import Name, open_model
from ondevice.backends.base import Float32, Linear, Norm
from ondevice.backends.cpu import CpuBackend
from ondevice.backends.cpu_matrices import StreamedHead
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.callbacks import OnProgress, ignore_progress, never_cancelled
from ondevice.config import RuntimeConfig, SamplingConfig
from ondevice.doctor.rates import multiply_rate, product_rate
from ondevice.errors import UsageError
from ondevice.model.weights import ModelWeights
from ondevice.records import dataclass
from ondevice.runtime.backend_choice import on_kernels
from ondevice.runtime.engine import Engine
from ondevice.runtime.resolving import check_tokens
from ondevice.scoring import benchmark_prompt, machine
from ondevice.stats import per_second

WARM_UP_TOKENS = 8
DRAFT_KEY = 0
"""Key of the state after which drafts are computed."""


class Part(NamedTuple):
    """A part of a pass. macs: number of products of two numbers. nbytes: bytes of weights, keys and values
    that it reads.
    """

    seconds: float
    macs: int
    nbytes: int

    def to_dict(self) -> dict[str, float]:
        rates = {
            "macs_per_second": per_second(self.macs, self.seconds),
            "bytes_per_second": per_second(self.nbytes, self.seconds),
        }
        return {"seconds": self.seconds, **rates}


@dataclass(frozen=True)
class SplitPass:
    """A forward pass over `tokens` tokens that follow `position` others, and how its time divides. Mean of
    several passes.

    seconds: from its begin to the begin of the next one, by the wall clock. parts: by the names of the
    kernels' steps, and `flash`.
    """

    name: str
    tokens: int
    position: int
    seconds: float
    parts: Mapping[str, Part]

    def to_dict(self) -> dict[str, Any]:
        parts = {name: part.to_dict() for name, part in self.parts.items()}
        return {
            "pass": self.name,
            "tokens": self.tokens,
            "position": self.position,
            "seconds": self.seconds,
            "parts": parts,
        }


@dataclass(frozen=True)
class SplitPasses:
    """A model's passes by part, and the machine's peak rates.

    peaks: products of two numbers per second, with data in caches, on one thread and on all `threads`; and
    bytes per second of weights in memory that are multiplied.
    """

    model: str
    budget_bytes: int
    threads: int
    kernel_target: str
    peaks: Mapping[str, float]
    passes: tuple[SplitPass, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "dram_budget_bytes": self.budget_bytes,
            "threads": self.threads,
            "passes": [it.to_dict() for it in self.passes],
            "peaks": dict(self.peaks),
            "machine": machine(self.kernel_target),
        }


def split_passes(
    model: Name | None,
    runtime: RuntimeConfig,
    *,
    prompt_tokens: int,
    max_tokens: int,
    runs: int,
    on_progress: OnProgress = ignore_progress,
) -> SplitPasses:
    """Measure the parts of a synthetic prompt's pass, of the passes of `max_tokens` tokens after it, and of a
    draft's pass.

    The run with the median time counts, out of `runs`. Raises UsageError for fewer than 2 tokens,
    BackendUnavailableError for another backend than cpu, and what `load` and a generation raise.
    """
    if max_tokens < 2:
        raise UsageError(
            f"--max-tokens {max_tokens}: the first token comes with the prompt; ask for 2 or more"
        )
    resolved = open_model(model, on_kernels(runtime, "splitting passes"))
    check_tokens(resolved, range(prompt_tokens), max_tokens)
    resolved.require_fit()
    threads = resolved.runtime.threads
    on_progress(0.0, "this machine's rates")
    peaks = {
        "thread_macs_per_second": product_rate(1),
        "macs_per_second": product_rate(threads),
        "multiply_bytes_per_second": multiply_rate(threads),
    }
    prompt = benchmark_prompt(prompt_tokens, resolved.bundle.config.vocab_size)
    with closing(Engine(resolved, never_cancelled)) as engine, _clock(engine) as read:
        drafts = engine.drafts_from_memory
        engine.draft_with("off", None)
        ends = tuple((token, -math.inf) for token in resolved.bundle.manifest.tokenizer.eos_ids)
        sampling = SamplingConfig(max_tokens=max_tokens, logit_bias=ends)
        _generated(engine, prompt[:1], replace(sampling, max_tokens=WARM_UP_TOKENS), read)
        while engine.fill_ahead():
            pass
        pairs: list[tuple[SplitPass, SplitPass]] = []
        for run in range(runs):
            on_progress((run + 1) / (runs + 2), f"run {run + 1} of {runs}")
            pairs.append(_generated(engine, prompt, sampling, read))
        passes = [
            sorted(of_runs, key=lambda it: it.seconds)[runs // 2] for of_runs in zip(*pairs, strict=True)
        ]
        if drafts:
            passes.append(_drafted(engine, prompt, max_tokens, read))
        target = engine.kernel_target
    on_progress(1.0, "done")
    budget_bytes = resolved.plan.budget_bytes
    return SplitPasses(resolved.bundle.name, budget_bytes, threads, target, peaks, tuple(passes))


class _Reading(NamedTuple):
    """Readings at one moment: seconds of two clocks, and the totals of the kernels' steps."""

    seconds: float
    waited_seconds: float
    steps: Sequence[tuple[str, float, int, int]]

    def split(self, after: _Reading, name: str, tokens: int, position: int, passes: int) -> SplitPass:
        """The mean of the `passes` passes between this reading and a later one."""
        parts = {
            step: Part((seconds - seconds0) / passes, (macs - macs0) // passes, (nbytes - nbytes0) // passes)
            for (step, seconds0, macs0, nbytes0), (_, seconds, macs, nbytes) in zip(
                self.steps, after.steps, strict=True
            )
        }
        # Python waits for reads, between calls of the kernels.
        flash = (after.waited_seconds - self.waited_seconds) / passes
        parts["python"] = parts["python"]._replace(seconds=parts["python"].seconds - flash)
        parts["flash"] = Part(flash, 0, 0)
        return SplitPass(name, tokens, position, (after.seconds - self.seconds) / passes, parts)


def _generated(
    engine: Engine, prompt: Sequence[int], sampling: SamplingConfig, read: Callable[[], _Reading]
) -> tuple[SplitPass, SplitPass]:
    """The pass of a prompt, including its first token, and the mean of the passes of the tokens after it."""
    readings, count = [read()], 0
    for event in engine.generate(None, prompt, sampling, never_cancelled):
        count += event.token is not None
        # Reading takes time, which is no pass's.
        if event.token is not None and count in (1, sampling.max_tokens):
            readings.append(read())
    begin, first, last = readings
    later = count - 1
    of_prompt = begin.split(first, "prompt", len(prompt), 0, 1)
    return of_prompt, first.split(last, "token", 1, len(prompt) + later // 2, later)


def _drafted(engine: Engine, prompt: Sequence[int], passes: int, read: Callable[[], _Reading]) -> SplitPass:
    """The mean pass of a draft's token after a prompt, over the weights in memory and the frequent tokens."""
    transformer = engine.transformer
    for _ in engine.logits(prompt, never_cancelled, DRAFT_KEY):
        pass
    with engine.kv.use(DRAFT_KEY) as kv:
        before = read()
        for _ in range(passes):
            batch = ForwardBatch(prompt[-1:], resident_only=True, last_only=True)
            transformer.frequent_logits(transformer.run(batch, kv).hidden)
            kv.truncate(len(prompt))
        return before.split(read(), "draft", 1, len(prompt), passes)


@contextmanager
def _clock(engine: Engine) -> Iterator[Callable[[], _Reading]]:
    """A context in which the kernels count their steps, and products have names. Its value
    returns a reading.
    """
    backend = engine.transformer.backend
    assert isinstance(backend, CpuBackend)
    runner, linear = backend.runner, backend.linear
    names = _product_names(engine.transformer.weights)

    def named(x: Float32, weight: Linear, norm: Norm | None = None, added: Float32 | None = None) -> Float32:
        name = "head" if isinstance(weight, StreamedHead) else names.get(id(weight), "other_products")
        runner.name_products(name)
        try:
            return linear(x, weight, norm, added)
        finally:
            runner.name_products("other_products")

    def read() -> _Reading:
        waited_seconds = engine.counters().waited_seconds
        # With nothing in between, both clocks have the same moment.
        steps = runner.step_times()
        return _Reading(time.perf_counter(), waited_seconds, steps)

    runner.time_steps(True)
    setattr(backend, "linear", named)  # noqa: B010
    try:
        yield read
    finally:
        delattr(backend, "linear")
        runner.time_steps(False)


def _product_names(weights: ModelWeights) -> dict[int, str]:
    """The names of the steps for matrices that have a separate step, by `id` of the matrix."""
    names = {id(weights.head): "head"}
    for layer in weights.layers:
        names |= {id(layer.qkv): "qkv", id(layer.out): "output"}
    return names
