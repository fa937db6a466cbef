"""Plans, figures and conversations as text for people: pure functions, which know no widget and no model."""

from __future__ import annotations

from collections.abc import Sequence

import ondevice

CUT_SHORT = "The reply was cut short: it is as long as one may be, or the conversation fills the context."
NAMES = {"user": "You", "assistant": "Model", "system": "Instructions"}


def size(nbytes: int) -> str:
    """Decimal units, as budgets are given in."""
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:.2f} GB"
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.0f} kB"


def conversation(messages: Sequence[dict[str, str]], notice: str) -> str:
    """All that was said, and last what the app itself has to say."""
    said = [f"{NAMES[message['role']]}: {message['content']}" for message in messages]
    return "\n\n".join([*said, f"({notice})"] if notice else said)


def budget(plan: ondevice.Plan, yielding: bool) -> str:
    """The budget and what bounds it."""
    other = " while other programs need the rest" if yielding else ""
    return (
        f"Memory: {size(plan.budget_bytes)}{other}; the least that works is "
        f"{size(plan.minimum_budget_bytes)}, and {size(plan.full_bytes)} hold everything"
    )


def division(plan: ondevice.Plan) -> str:
    """How the plan divides the budget."""
    parts = plan.to_json()
    total = int(parts["segments_total"])
    share = int(parts["segments_at_start"]) / total if total else 1.0
    buffers = plan.staging_bytes + plan.activation_bytes + plan.predictor_bytes + plan.draft_bytes
    return (
        f"Plan: weights {size(plan.resident_weights_bytes)}, context {size(plan.kv_cache_bytes)}, "
        f"neurons {size(plan.neuron_cache_bytes)} or more (at first {share:.0%} of all), "
        f"buffers {size(buffers)}, "
        f"app {size(plan.process_bytes)}"
    )


def figures(stats: ondevice.GenerationStats) -> str:
    """What the last reply cost."""
    per_token = stats.flash_bytes_read // max(1, stats.generated_tokens)
    return (
        f"Reply: {stats.generated_tokens} tokens, {stats.decode_tokens_per_second:.0f} a second, the first "
        f"after {stats.time_to_first_token_seconds:.2f} s; memory at most {size(stats.peak_memory_bytes)}; "
        f"flash {size(per_token)} a token, cache hits {stats.neuron_cache_hit_rate:.0%}"
    )


def progress(tokens: int, seconds: float) -> str:
    """Of a reply that is still being written."""
    return (
        f"Reply: {tokens} tokens, {tokens / seconds:.0f} a second"
        if tokens and seconds
        else "Reply: reading ..."
    )


def refused_budget(asked_bytes: int, error: ondevice.BudgetError) -> str:
    """Why a budget wasn't taken, and which is."""
    if asked_bytes >= error.required_bytes:
        return f"{error}"  # It is more than the system gives this process.
    return (
        f"{size(asked_bytes)} isn't enough: the smallest budget that works is {size(error.required_bytes)}."
    )
