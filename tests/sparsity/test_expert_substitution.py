"""`--expert-substitution`: an expert in memory in the place of a missing one. Lossy, and labelled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from ondevice.api import Model, inspect, load
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.neuron_source import Substitutes
from ondevice.backends.routing import Routing
from ondevice.bundle.reader import Bundle
from ondevice.commands.inspection import inspection, inspection_text
from ondevice.config import RuntimeConfig
from ondevice.converters.convert import convert
from ondevice.errors import BackendUnavailableError, UnsupportedModelError, UsageError
from ondevice.runtime.resolving import resolve
from ondevice.sparsity.experts import ExpertFetcher
from tests.support.chat import squeeze
from tests.support.command_line import Run
from tests.support.families import CASES, write_model
from tests.support.slow_memory import slow_memory
from tests.support.trained_models import MIXTURE, own_text

PROMPT = [5, 9, 17, 33, 5, 9, 17, 33, 5, 9, 17, 61, 5, 9]
ANY = 100.0
"""More standard deviations than scores of one token differ by: whatever is in memory is near enough."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight experts, three for each token, of which weights aren't renormalised."""
    made = tmp_path_factory.mktemp("experts")
    write_model(made / "source", *CASES["olmoe"])
    return convert(made / "source", made / "bundle", "q4")


@contextmanager
def squeezed(folder: Path, within: float, share: int = 3) -> Iterator[Model]:
    """The model with room for a third of its experts beside those of a pass."""
    # A short context: else there is room for all experts before it has filled.
    options = {"speculation": "off", "backend": "cpu", "max_context": 96}
    with load(folder, **options, expert_substitution=within) as model:
        segment = model.plan.segment
        squeeze(model, (segment.total - segment.least) // share)
        yield model


def test_off_is_the_exact_text(folder: Path) -> None:
    with load(folder, speculation="off", backend="cpu") as model:
        whole, logits = model.generate(tokens=PROMPT, max_tokens=40), model.logits(PROMPT)
    with squeezed(folder, 0.0) as model:
        found = model.generate(tokens=PROMPT, max_tokens=40)
        assert found.tokens == whole.tokens
        assert model.logits(PROMPT).tobytes() == logits.tobytes()
        assert found.stats.neuron_cache_hit_rate < 1.0
        assert (found.stats.expert_substitution, found.stats.substituted_experts) == (0.0, 0)


def test_where_all_experts_have_room_it_changes_no_bit(folder: Path) -> None:
    """From the first token on, though the cache is empty."""
    with load(folder, speculation="off", backend="cpu") as model:
        whole, logits = model.generate(tokens=PROMPT, max_tokens=40), model.logits(PROMPT)
    with load(folder, speculation="off", backend="cpu", expert_substitution=ANY) as model:
        found = model.generate(tokens=PROMPT, max_tokens=40)
        assert found.tokens == whole.tokens
        assert model.logits(PROMPT).tobytes() == logits.tobytes()
        assert found.stats.substituted_experts == 0
        assert found.stats.expert_substitution == ANY


@pytest.mark.fast("gpt-oss moe")
@pytest.mark.parametrize("case", ["olmoe", "olmoe renormalised", "glm4 moe", "gpt-oss moe"])
def test_a_pass_reads_nothing_where_any_expert_will_do(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Softmax of all, of the chosen, sigmoids with groups: decoding reads less."""
    monkeypatch.setattr(ExpertFetcher, "fill", lambda _: False)
    write_model(tmp_path / "source", *CASES[case])
    bundle = convert(tmp_path / "source", tmp_path / "bundle", "q4")
    with squeezed(bundle, ANY, share=2) as model, squeezed(bundle, 0.0, share=2) as exact:
        found, own = (it.generate(tokens=PROMPT, max_tokens=60).stats for it in (model, exact))
        assert found.substituted_experts > 0
        assert found.flash_bytes_read < own.flash_bytes_read
        assert np.isfinite(model.logits(PROMPT)).all()


def test_the_same_runs_have_the_same_text(folder: Path) -> None:
    """The text depends on what is in memory, and on nothing that the clock decides."""
    texts = []
    for threads in (1, 2, 1):
        with load(folder, speculation="off", threads=threads, expert_substitution=1.0) as model:
            squeeze(model, 6)
            texts.append([model.generate(tokens=PROMPT, max_tokens=40).tokens for _ in range(3)])
    assert texts[0] == texts[1] == texts[2]


def test_how_soon_memory_comes_changes_no_text() -> None:
    """What is held doesn't depend on it, while without substitution passes evict rather than wait."""
    texts, options = [], {"max_tokens": 40, "logit_bias": dict.fromkeys(range(3), -math.inf)}
    for seconds in (0.0, 0.05):
        with pytest.MonkeyPatch.context() as patch:
            slow_memory(patch, seconds)
            with load(MIXTURE, speculation="off", max_context=128, expert_substitution=1.0) as model:
                squeeze(model, 4)
                texts.append(model.generate(tokens=own_text(MIXTURE, 24), **options).tokens)
    assert len(texts[0]) == 40
    assert texts[0] == texts[1]


def test_prompts_are_exact(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes over more than one token take the routers' own choice, their last layer too."""
    asked: list[Substitutes | None] = []
    own = ExpertFetcher.substitutes

    def spied(self: ExpertFetcher, layer: int, routing: Routing) -> Substitutes | None:
        asked.append(own(self, layer, routing))
        return asked[-1]

    monkeypatch.setattr(ExpertFetcher, "substitutes", spied)
    with squeezed(folder, ANY) as model, squeezed(folder, 0.0) as exact:
        first = model.generate(tokens=PROMPT, max_tokens=1)
        assert first.tokens == exact.generate(tokens=PROMPT, max_tokens=1).tokens
        assert asked.count(None) == len(asked) > 0
        model.generate(tokens=PROMPT, max_tokens=10)
        assert asked.count(None) < len(asked)


def test_scoring_goes_token_by_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`eval` and `logits` measure what decoding does."""
    widths: list[int] = []
    own = ExpertFetcher.begin_pass

    def spied(self: ExpertFetcher, batch: ForwardBatch) -> None:
        widths.append(len(batch.tokens))
        own(self, batch)

    monkeypatch.setattr(ExpertFetcher, "begin_pass", spied)
    with squeezed(folder, 0.5) as model:
        assert model.logits(PROMPT).shape[0] == len(PROMPT)
    assert widths == [1] * len(PROMPT)


def test_the_cache_learns_what_routers_chose(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an expert in memory would stay there because it was in memory."""
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    own = ExpertFetcher._observe

    def spied(self: ExpertFetcher, turn: int, routing: Routing, batch: ForwardBatch) -> None:
        if routing.own_ids is not None:
            seen.append((np.flatnonzero(routing.gates[0] > 0), routing.own_ids[0]))
            assert routing.ids[0].tolist() != routing.own_ids[0].tolist()
        own(self, turn, routing, batch)

    monkeypatch.setattr(ExpertFetcher, "_observe", spied)
    with squeezed(folder, ANY) as model:
        count = model.generate(tokens=PROMPT, max_tokens=20).stats.substituted_experts
    assert count >= len(seen) > 0
    assert all(gates.tolist() == ids.tolist() for gates, ids in seen)


def test_it_is_labelled(ondevice: Run, folder: Path) -> None:
    bundle = Bundle.open(folder)
    plain, lossy = (
        resolve(bundle, RuntimeConfig(backend="cpu", expert_substitution=within)) for within in (0.0, 0.5)
    )
    facts, other = inspection(plain)["experts"], inspection(lossy)["experts"]
    assert (facts["substitution"], facts["lossy"]) == (0.0, False)
    assert (other["substitution"], other["lossy"]) == (0.5, True)
    line = "lossy: an expert in memory takes the place of a missing one that scores up to 0.5 standard"
    assert line not in inspection_text(plain)
    assert line in inspection_text(lossy)
    assert lossy.runtime.speculation == "off"
    model = ("-m", folder, "--expert-substitution", 0.5)
    run = ondevice("bench", *model, "--prompt-tokens", 5, "--max-tokens", 4, "--runs", 1, "--json")
    assert run.json["expert_substitution"] == 0.5
    assert run.json["substituted_experts"] >= 0
    assert line in run.err
    assert "; lossy: --expert-substitution 0.5, " in run.err
    exact = ondevice("bench", "-m", folder, "--prompt-tokens", 5, "--max-tokens", 4, "--runs", 1, "--json")
    assert exact.json["expert_substitution"] == 0.0
    assert "lossy" not in exact.err


def test_what_cannot_substitute_is_refused(folder: Path, chat_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"expert_substitution=0.5 isn't possible .* no experts"):
        inspect(chat_bundle, expert_substitution=0.5)
    for backend in ("mlx", "reference"):
        with pytest.raises(BackendUnavailableError, match=r'expert_substitution=0.5.* backend="cpu"'):
            load(folder, expert_substitution=0.5, backend=backend)
    for drafts in ({"speculation": "lookup"}, {"draft_model": chat_bundle}):
        with pytest.raises(UsageError, match=r'expert_substitution=0.5 takes speculation="off"'):
            load(folder, expert_substitution=0.5, **drafts)
    for wrong in (-0.1, 101.0, float("nan"), float("inf"), True, "1"):
        with pytest.raises(UsageError, match=r"expert_substitution is .*; it must be a number from 0 to 100"):
            load(folder, expert_substitution=wrong)
    with pytest.raises(UsageError, match=r'expert_substitution has no meaning without sparsity="experts"'):
        load(folder, expert_substitution=0.5, sparsity="dense")
    write_model(tmp_path / "source", *CASES["phimoe"])
    mixer = convert(tmp_path / "source", tmp_path / "bundle", "q4")
    with pytest.raises(UnsupportedModelError, match="its router is a sparsemixer"):
        load(mixer, expert_substitution=0.5)
