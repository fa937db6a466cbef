"""A model's text under configurations that must not change it."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice.bundle.reader import Bundle
from ondevice.errors import BudgetError, BundleError, FlashReadError, OndeviceError, UsageError
from ondevice.speculation.tree import DRAFT_NODES
from ondevice.units import process_memory
from tests.fuzz.outcomes import Difference
from tests.support.engines import always_draft

ROOM_BYTES = 96 << 20
"""Above what the process has: the budget under which a model is looked at."""
MAX_TOKENS = 8
DRAFTED_ROWS = [DRAFT_NODES, 3, 7]
"""Rows of each pass with a draft, in turn."""
EXACT: dict[str, list[Any]] = {
    "sparsity": ["dense", "exact"],
    "threads": [1, 2],
    "speculation": ["off", "streams", "lookup", "recycling", "resident", "eagle", "dflash", "mtp"],
    "io": ["direct", "buffered"],
    "kernel_target": ["auto", "scalar"],
}
"""What changes no token, by option."""
SIDECAR_DRAFTERS = ("streams", "eagle", "dflash", "mtp")
"""Drafters that read a sidecar of the bundle, each named as that is."""
FILE_WORDS = ".safetensors"
"""What errors have that name a damaged file."""
DAMAGE = (BundleError, FlashReadError)


@dataclass
class Trial:
    """One bundle's runs.

    allowed_bytes: the largest budget that any of them had. drafter: of all but the first, which then has
    none; any if it is empty.
    """

    folder: Path
    rng: random.Random
    allowed_bytes: int = 0
    drafter: str = ""
    texts: dict[str, Any] = field(default_factory=dict)

    def run(self, count: int = 2) -> int:
        """Generate under `count` configurations and compare. Returns allowed_bytes.

        Raises what the first configuration is refused with, and Difference.
        """
        # As drafts of texts so short seldom pay. A case has a process of its own: nothing is undone.
        always_draft(pytest.MonkeyPatch(), DRAFTED_ROWS)
        try:
            self._run(count)
        except OndeviceError as error:
            error.allowed_bytes = self.allowed_bytes  # type: ignore[attr-defined]
            raise
        return self.allowed_bytes

    def _run(self, count: int) -> None:
        bundle = Bundle.open(self.folder)
        config = bundle.config
        self.allowed_bytes = process_memory().current_bytes + ROOM_BYTES
        prompt = [self.rng.randrange(config.vocab_size) for _ in range(self.rng.choice([1, 5, 20]))]
        prompt = prompt[: max(1, config.max_context // 2)]
        refusal: OndeviceError | None = None
        for options in self._configurations(bundle, count):
            lossy = options.get("sparsity") == "predicted"
            name = ", ".join(f"{key}={value}" for key, value in options.items())
            try:
                outcome: Any = self._text(prompt, options)
            except DAMAGE as error:
                refusal = refusal or error
                # Damage of a file is found by whoever reads that part of it: gate rows beside neurons in
                # dense mode, records of neurons that fire, sidecars where they draft.
                if lossy or options["speculation"] in SIDECAR_DRAFTERS or FILE_WORDS in str(error):
                    continue
                outcome = type(error).__name__
            except OndeviceError as error:
                refusal = refusal or error
                continue
            if not lossy:
                self.texts[name] = outcome
        if len({str(text) for text in self.texts.values()}) > 1:
            raise Difference(
                "; ".join(f"{name}: {text}" for name, text in self.texts.items()) + f" ({refusal})"
            )
        if refusal is not None:
            raise refusal

    def _configurations(self, bundle: Bundle, count: int) -> list[dict[str, Any]]:
        """Such as the bundle can have: one that lacks a sidecar is refused modes that need it."""
        config, found = bundle.config, []
        lossy = ["predicted"] * (bundle.predictors is not None)
        for index in range(count):
            options = {name: self.rng.choice(values) for name, values in EXACT.items()}
            if not config.zeros_gates:
                del options["sparsity"]
            if self.drafter:
                options["speculation"] = self.drafter if index else "off"
            name = options["speculation"]
            if name in SIDECAR_DRAFTERS and getattr(bundle, name) is None:
                options["speculation"] = "off"
            if config.experts is not None:
                # Refused: such drafts would take other experts than the model's own.
                options["speculation"] = options["speculation"].replace("resident", "off")
            if lossy and self.rng.random() < 0.2:
                options["sparsity"] = self.rng.choice(lossy)
            options["scale"] = self.rng.choice([1.01, 1.3]) if index else 1.01
            found.append(options)
        return found

    def _text(self, prompt: list[int], options: dict[str, Any]) -> list[int]:
        options = dict(options)
        scale = options.pop("scale")
        common: dict[str, Any] = {"memory_pressure": "off", **options}
        plan = ondevice.inspect(self.folder, dram_budget=self.allowed_bytes, **common)
        budget = int(scale * plan.minimum_budget_bytes) + (1 << 20)
        if budget > self.allowed_bytes + (256 << 20):
            raise BudgetError("the smallest budget is beyond what this test gives", budget)
        self.allowed_bytes = max(self.allowed_bytes, budget)
        with ondevice.load(self.folder, dram_budget=budget, **common) as model:
            tokens = prompt[: max(1, plan.max_context - 1)]
            response = model.generate(tokens=tokens, max_tokens=MAX_TOKENS, temperature=0.8, seed=7)
            if self.rng.random() < 0.3:
                self._talk(model)
        return list(response.tokens)

    def _talk(self, model: ondevice.Model) -> None:
        """A turn of a conversation, for its template and its tokenizer."""
        session = model.session("Be brief.")
        try:
            session.respond("hello <s> wörld", max_tokens=3)
        except (UsageError, ondevice.ContextOverflowError, *DAMAGE):
            # Not every model has a tokenizer, not every template takes a system message.
            return
        session.fork().reset()


def copied(source: Path, folder: Path) -> Path:
    """A copy that may be spoilt."""
    return Path(shutil.copytree(source, folder, symlinks=True))
