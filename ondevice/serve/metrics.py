"""Counters of the server, in the form that Prometheus reads, and the log: one JSON object per line."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ondevice.stats import GenerationStats, per_second

log = logging.getLogger("ondevice.serve")

_HELP = {
    "requests_total": ("counter", "Requests by path and status."),
    "generations_total": ("counter", "Generations by how they ended."),
    "prompt_tokens_total": ("counter", "Tokens of prompts."),
    "generated_tokens_total": ("counter", "Tokens generated, as they come."),
    "first_token_seconds_total": ("counter", "Seconds from a turn's beginning to its first token."),
    "decode_seconds_total": ("counter", "Seconds of the forward passes behind prompts."),
    "flash_bytes_read_total": ("counter", "Bytes read from flash by generations that ended."),
    "neuron_cache_hit_ratio": ("gauge", "Share of selected neurons or experts that were in memory."),
    "peak_memory_bytes": ("gauge", "Peak memory of the process, as of the last generation."),
    "waiting_requests": ("gauge", "Requests that wait for their turn."),
    "running_requests": ("gauge", "Requests that generate."),
}

_LLAMA_CPP_HELP = {
    "prompt_tokens_total": ("counter", "Tokens of prompts that were computed."),
    "prompt_seconds_total": ("counter", "Seconds from a turn's beginning to its first token."),
    "tokens_predicted_total": ("counter", "Tokens generated."),
    "tokens_predicted_seconds_total": ("counter", "Seconds of the forward passes behind prompts."),
    "n_decode_total": ("counter", "Forward passes."),
    "n_tokens_max": ("counter", "Most tokens of a prompt and what followed it."),
    "spec_decode_num_draft_tokens_total": ("counter", "Draft tokens."),
    "spec_decode_num_accepted_tokens_total": ("counter", "Draft tokens that became text."),
    "spec_decode_num_drafts_total": ("counter", "Forward passes with draft tokens."),
    "prompt_tokens_seconds": ("gauge", "Prompt tokens per second, over all generations."),
    "predicted_tokens_seconds": ("gauge", "Generated tokens per second, over all generations."),
    "requests_processing": ("gauge", "Requests that generate."),
    "requests_deferred": ("gauge", "Requests that wait for their turn."),
}
"""Counters of ended generations by the names of llama.cpp's server, for programs that watch it."""


class Metrics:
    """The server's counts, by name and labels. Only the event loop's thread may use them."""

    def __init__(self) -> None:
        self._values: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
        for name in _HELP:
            if name not in ("requests_total", "generations_total", "neuron_cache_hit_ratio"):
                self._values[name, ()] = 0
        self._ended: Counter[str] = Counter()
        """Sums over generations that ended, by llama.cpp's names."""
        self._most_tokens = 0

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter or a gauge."""
        self._values[name, tuple(sorted(labels.items()))] += amount  # type: ignore[assignment]

    def value(self, name: str) -> float:
        """The value of a counter or a gauge without labels."""
        return self._values[name, ()]

    @property
    def drafts(self) -> tuple[int, int]:
        """The number of draft tokens in ended generations, and how many of them became text."""
        drafted, accepted = "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"
        return self._ended[drafted], self._ended[accepted]

    def generated(self, stats: GenerationStats, reason: str) -> None:
        """Count an ended generation."""
        self.add("generations_total", reason=reason)
        self.add("prompt_tokens_total", stats.prompt_tokens)
        self.add("first_token_seconds_total", stats.time_to_first_token_seconds)
        self.add("decode_seconds_total", stats.decode_seconds)
        self.add("flash_bytes_read_total", stats.flash_bytes_read)
        self._values["peak_memory_bytes", ()] = stats.peak_memory_bytes
        self._most_tokens = max(self._most_tokens, stats.prompt_tokens + stats.generated_tokens)
        drafting = stats.drafting
        for name, amount in (
            ("prompt_tokens_total", stats.prompt_tokens - stats.reused_tokens),
            ("prompt_seconds_total", stats.time_to_first_token_seconds),
            ("tokens_predicted_total", stats.generated_tokens),
            ("tokens_predicted_seconds_total", stats.decode_seconds),
            ("n_decode_total", stats.forward_passes),
            ("spec_decode_num_draft_tokens_total", drafting.draft_tokens),
            ("spec_decode_num_accepted_tokens_total", sum(drafting.accepted_by_depth)),
            ("spec_decode_num_drafts_total", drafting.drafts),
        ):
            self._ended[name] += amount  # type: ignore[assignment]
        if stats.neuron_cache_hit_rate:
            # 0 may mean no lookups: the gauge keeps an earlier generation's ratio.
            self._values["neuron_cache_hit_ratio", ()] = stats.neuron_cache_hit_rate  # type: ignore[assignment]

    def text(self) -> str:
        """All counts in Prometheus's text format, version 0.0.4."""
        lines: list[str] = []
        for name, (kind, about) in _HELP.items():
            lines += [f"# HELP ondevice_{name} {about}", f"# TYPE ondevice_{name} {kind}"]
            for (counted, labels), value in sorted(self._values.items()):
                if counted == name:
                    shown = ",".join(f"{key}={json.dumps(label)}" for key, label in labels)
                    lines.append(f"ondevice_{name}{'{' + shown + '}' if shown else ''} {value}")
        values = self._of_llama_cpp()
        for name, (kind, about) in _LLAMA_CPP_HELP.items():
            lines += [f"# HELP llamacpp:{name} {about}", f"# TYPE llamacpp:{name} {kind}"]
            lines.append(f"llamacpp:{name} {values[name]}")
        return "\n".join(lines) + "\n"

    def _of_llama_cpp(self) -> dict[str, float]:
        """The counts under llama.cpp's names."""
        ended = {name: self._ended[name] for name in _LLAMA_CPP_HELP}
        return ended | {
            "n_tokens_max": self._most_tokens,
            "prompt_tokens_seconds": per_second(ended["prompt_tokens_total"], ended["prompt_seconds_total"]),
            "predicted_tokens_seconds": per_second(
                ended["tokens_predicted_total"], ended["tokens_predicted_seconds_total"]
            ),
            "requests_processing": self.value("running_requests"),
            "requests_deferred": self.value("waiting_requests"),
        }


class IgnoredLog:
    """Logs names of ignored fields, each only once, since agents send them with every request."""

    _MAX_NAMES, _MAX_NAMES_AT_ONCE = 1000, 20

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, names: Sequence[str]) -> None:
        """Log the new names in one line."""
        fresh = [name for name in names if name not in self._told]
        if fresh and len(self._told) < self._MAX_NAMES:
            self._told.update(fresh[: self._MAX_NAMES])
            log_event("ignored", fields=fresh[: self._MAX_NAMES_AT_ONCE], number=len(fresh))


def log_event(what: str, level: int = logging.INFO, **facts: Any) -> None:
    """Log one event as a JSON object."""
    log.log(level, "%s", json.dumps({"event": what, **facts}))
