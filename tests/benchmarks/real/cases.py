"""What is measured of each real model: the cases, their sizes, and the arms that take them in pairs."""

from __future__ import annotations

from dataclasses import dataclass

from real_models.table import REAL_MODELS

MODELS = tuple(REAL_MODELS)
QUICK_MODELS = ("smollm2", "qwen2.5-coder-1.5b")
DRAFT_MODELS = {"qwen2.5-coder-1.5b": "qwen2.5-coder-0.5b"}
"""The model that drafts for another with `--speculation model`."""
ONDEVICE, LLAMA_CPP = "ondevice", "llama.cpp"
ENGINES = (ONDEVICE, LLAMA_CPP)
DRAFTING = "ondevice with drafts"
"""The arm of ondevice as it is by default, `--speculation auto`; that of its name alone makes no drafts."""
LIMITED_ARMS = (ONDEVICE, DRAFTING, LLAMA_CPP)
"""The arms of cases in less memory than the file."""
FIRST_TOKENS = 24
"""Length of the first reply whose rate is compared with the steady one."""
SETTLING_TOKENS = 8
"""Tokens that a decode rate leaves out."""
TEMPERATURE = 0.8
"""Of drafts that aren't greedy."""


@dataclass(frozen=True)
class Case:
    """A prompt and its continuation, run by both engines in turn.

    warm_up: tokens made before the clock starts; 0 measures a start from nothing. share: per cent of the
    GGUF's size to which both are held; None: unlimited.
    """

    name: str
    prompt_tokens: int
    max_tokens: int
    pairs: int
    warm_up: int = 4
    left_out: int = SETTLING_TOKENS
    share: int | None = None

    @property
    def context(self) -> int:
        """Tokens that keys and values have room for: a multiple of 256, as llama.cpp takes it."""
        return -(-(self.prompt_tokens + self.max_tokens) // 256) * 256

    @property
    def arms(self) -> tuple[str, ...]:
        """What takes the case, pair by pair."""
        return ENGINES if self.share is None else LIMITED_ARMS


@dataclass(frozen=True)
class DraftCase:
    """Prompts of each kind, continued with each drafter in turn; `rounds` of them.

    share: per cent of the GGUF's size; None: unlimited. temperature: 0 is greedy.
    """

    name: str
    share: int | None
    drafters: tuple[str, ...]
    rounds: int
    temperature: float = 0.0


@dataclass(frozen=True)
class Size:
    """How much is measured: the whole, or the quick part of it.

    shares: per cent of the GGUF's size to which both engines are held; draft_shares: those in which drafts
    are measured, besides everything resident; sampled_shares: those in which drafts of drawn tokens are, None
    being everything resident.
    """

    name: str
    models: tuple[str, ...]
    pairs: int
    long_pairs: int
    depth_pairs: int
    budget_pairs: int
    shares: tuple[int, ...]
    drafters: tuple[str, ...]
    draft_rounds: int
    draft_tokens: int
    draft_shares: tuple[int, ...]
    sampled_shares: tuple[int | None, ...]
    quality_tokens: int

    def draft_cases(self, has_model: bool) -> list[DraftCase]:
        """The greedy cases. has_model: whether a second model can draft."""
        drafters = self.drafters if has_model else tuple(it for it in self.drafters if it != "model")
        limited = [
            DraftCase(f"drafts-{share}", share, ("off", "auto", "resident"), 1) for share in self.draft_shares
        ]
        return [DraftCase("drafts-resident", None, drafters, self.draft_rounds), *limited]

    def sampled_cases(self) -> list[DraftCase]:
        """The cases in which tokens are drawn."""
        return [
            DraftCase(
                f"sampled-{'resident' if share is None else share}",
                share,
                ("off", "auto"),
                self.draft_rounds,
                TEMPERATURE,
            )
            for share in self.sampled_shares
        ]

    def cases(self, context: int) -> list[Case]:
        """The cases that a model with a context of `context` tokens can take."""
        after_prompt = SETTLING_TOKENS + 32
        steady = FIRST_TOKENS + 48
        cases = [
            Case("start", 256, steady, self.pairs, warm_up=0, left_out=FIRST_TOKENS),
            Case("prompt-256", 256, 1, self.pairs),
            Case("depth-128", 128, after_prompt, self.pairs),
            Case("prompt-2048", 2048, after_prompt, self.long_pairs),
        ]
        if self.depth_pairs:
            cases.append(Case("depth-4096", 4096, after_prompt, self.depth_pairs))
        for share in self.shares:
            name = f"budget-{share}"
            cases.append(Case(name, 128, SETTLING_TOKENS + 24, self.budget_pairs, warm_up=0, share=share))
        return [case for case in cases if case.prompt_tokens + case.max_tokens <= context]


WHOLE = Size(
    "whole",
    MODELS,
    pairs=3,
    long_pairs=2,
    depth_pairs=1,
    budget_pairs=2,
    shares=(80, 65, 57, 45, 35, 20),
    drafters=("off", "auto", "lookup", "recycling", "resident", "model"),
    draft_rounds=2,
    draft_tokens=48,
    draft_shares=(80, 65, 57, 45, 35),
    sampled_shares=(None, 57),
    quality_tokens=16_384,
)
QUICK = Size(
    "quick",
    QUICK_MODELS,
    pairs=2,
    long_pairs=1,
    depth_pairs=0,
    budget_pairs=1,
    shares=(57, 35),
    drafters=("off", "auto"),
    draft_rounds=1,
    draft_tokens=48,
    draft_shares=(),
    sampled_shares=(),
    quality_tokens=2_048,
)
SIZES = {size.name: size for size in (WHOLE, QUICK)}
QUALITY_WINDOW = 512


def quality_windows(first: list[int], text: list[int], count: int) -> list[list[int]]:
    """Windows of 512 tokens that hold `count` in all, each with what the model begins texts with."""
    step = QUALITY_WINDOW - len(first)
    windows = [[*first, *text[start : start + step]] for start in range(0, len(text) - step + 1, step)]
    return windows[: count // QUALITY_WINDOW]
