"""Short generations of the small chat bundle, which several test files compare."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ondevice
from ondevice.api import Model
from tests.bundles import EOS

PROMPT = "Once upon a time"


def greedy(model: Model, count: int = 24, **options: Any) -> tuple[int, ...]:
    return model.generate(PROMPT, max_tokens=count, logit_bias={EOS: -math.inf}, **options).tokens


def budget_between(bundle: Path, quarters: int) -> int:
    """A budget from the smallest (0) to everything resident (4), by what this process holds right now."""
    plan = ondevice.inspect(bundle)
    return plan.minimum_budget_bytes + (plan.full_bytes - plan.minimum_budget_bytes) * quarters // 4
