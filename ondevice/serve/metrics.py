"""Counters of the server, as Prometheus reads them, and the log: a JSON object a line."""

from __future__ import annotations

import json
import logging
from collections import Counter
from typing import Any

from ondevice.stats import GenerationStats

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


class Metrics:
    """Counts by name and labels. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._values: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
        for name in _HELP:
            if name not in ("requests_total", "generations_total", "neuron_cache_hit_ratio"):
                self._values[name, ()] = 0

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter or a gauge."""
        self._values[name, tuple(sorted(labels.items()))] += amount  # type: ignore[assignment]

    def value(self, name: str) -> float:
        """A counter or a gauge that has no labels."""
        return self._values[name, ()]

    def generated(self, stats: GenerationStats, reason: str) -> None:
        """Count a generation that came to its end."""
        self.add("generations_total", reason=reason)
        self.add("prompt_tokens_total", stats.prompt_tokens)
        self.add("first_token_seconds_total", stats.time_to_first_token_seconds)
        self.add("decode_seconds_total", stats.decode_seconds)
        self.add("flash_bytes_read_total", stats.flash_bytes_read)
        self._values["peak_memory_bytes", ()] = stats.peak_memory_bytes
        if stats.neuron_cache_hit_rate:
            # Without a hit, nothing may have been looked up: the ratio stays that of an earlier generation.
            self._values["neuron_cache_hit_ratio", ()] = stats.neuron_cache_hit_rate  # type: ignore[assignment]

    def text(self) -> str:
        """Everything in Prometheus's text format, version 0.0.4."""
        lines: list[str] = []
        for name, (kind, about) in _HELP.items():
            lines += [f"# HELP ondevice_{name} {about}", f"# TYPE ondevice_{name} {kind}"]
            for (counted, labels), value in sorted(self._values.items()):
                if counted == name:
                    shown = ",".join(f"{key}={json.dumps(label)}" for key, label in labels)
                    lines.append(f"ondevice_{name}{'{' + shown + '}' if shown else ''} {value}")
        return "\n".join(lines) + "\n"


def log_event(what: str, level: int = logging.INFO, **facts: Any) -> None:
    """Log one event as a JSON object."""
    log.log(level, "%s", json.dumps({"event": what, **facts}))
