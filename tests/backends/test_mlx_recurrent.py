"""Recurrent layers and gated attention on MLX: near `reference`, and one text whatever the way of running it.

`tests/model/test_recurrent_states.py` compares the bits of single passes, drafts and saved states.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.backends import recurrent, reference_recurrence
from ondevice.backends.base import Norm
from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.recurrent import RULE_TOKENS, Ahead, DeltaWeights, MixerWeights
from ondevice.backends.reference_recurrence import of_pass
from ondevice.backends.token_tree import TokenTree
from ondevice.budget.mlx_memory import MLX_CACHE_BYTES, MlxMemory
from ondevice.bundle.reader import Bundle
from ondevice.config import RuntimeConfig
from ondevice.converters.convert import convert
from ondevice.model_config import ConvSpec, DeltaSpec, Mamba2Spec, RecurrentSpec
from ondevice.runtime import backend_choice
from tests.support.bundles import EOS, write_byte_tokenizer
from tests.support.cached_texts import PROMPT, said, settle, written
from tests.support.engines import always_draft, error, random_tokens
from tests.support.families import CASES, write_model
from tests.support.mixer_families import MIXER_CASES
from tests.support.mlx_models import ON_GPU, loaded, run_every_op, smallest
from tests.support.scripted_drafts import drafted
from tests.support.shared_texts import alone, asked, together
from tests.support.small_models import MODELS, write_small

mx = pytest.importorskip("mlx.core", exc_type=ImportError)
from ondevice.backends.mlx_ops import MlxOps  # noqa: E402
from ondevice.backends.mlx_states import MlxBuffer, MlxStates, Slot, state_shapes  # noqa: E402

pytestmark = pytest.mark.usefixtures("mlx_device")

TOLERANCE = 2e-2 if ON_GPU else 1e-3
on_cpu = pytest.mark.skipif(ON_GPU, reason="a GPU doesn't promise equal bits of chunks")
DELTAS = [DeltaSpec(1, 1, 16, 16), DeltaSpec(2, 6, 20, 12, 3), DeltaSpec(4, 4, 64, 32, 2)]
CONVS = [ConvSpec(7, 3), ConvSpec(64, 2), ConvSpec(40, 5)]
FACTORS: dict[str, Any] = {"time_factor": 0.75, "gate_factor": 1.5, "out_factor": 0.375}
MIXERS = [
    Mamba2Spec(1, 16, 1, 16, 2, norm="none"),
    Mamba2Spec(6, 20, 2, 12, 3, conv_bias=True, norm_groups=3, **FACTORS),
    Mamba2Spec(4, 12, 4, 24, norm="before", norm_groups=2, least_time=0.1, most_time=1.5, **FACTORS),
]
LENGTH = 3 * RULE_TOKENS + 1
TREE = TokenTree([-1, 0, 0, 1, 1, 2, 3, 6, 5, 8, 2])


class Rule:
    """A rule or a short convolution by itself: random weights, inputs and a state before them."""

    def __init__(self, spec: RecurrentSpec) -> None:
        rng = np.random.default_rng(4)

        def values(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, dtype=np.float32)

        self.spec = spec
        self.projected = values(LENGTH, sum(spec.projections.values()))
        self.gates = values(LENGTH, spec.gate_floats)
        self.state = values(spec.state_floats)
        self.weights: Any = values(spec.taps, spec.channels)
        if isinstance(spec, DeltaSpec):
            heads, norm = spec.value_heads, Norm(values(spec.value_width), 1e-6)
            self.weights = DeltaWeights(self.weights, -np.exp(values(heads)), values(heads), norm)
        elif isinstance(spec, Mamba2Spec):
            bias = values(spec.channels) if spec.conv_bias else None
            parts = bias, -np.exp(values(spec.heads)), values(spec.heads), values(spec.heads)
            mixer_norm = None if spec.norm == "none" else Norm(values(spec.value_size), 1e-6)
            self.weights = MixerWeights(self.weights, *parts, mixer_norm)
        self.own_weights = self._on_mlx(self.weights)

    def _on_mlx(self, weights: Any) -> Any:
        if isinstance(weights, Norm):
            return weights._replace(weight=mx.array(weights.weight))
        if isinstance(weights, tuple):
            return type(weights)(*map(self._on_mlx, weights))  # type: ignore[call-arg, arg-type]
        return None if weights is None else mx.array(weights)

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        after = np.empty_like(self.state)
        states: Any = SimpleNamespace(
            state=lambda layer: self.state, next_state=lambda layer: after, ahead=lambda layer: None
        )
        if isinstance(self.spec, ConvSpec):
            found = reference_recurrence.short_conv(self.projected, states, 0, self.spec, self.weights)
        else:
            rule: Any = reference_recurrence.gated_delta
            if isinstance(self.spec, Mamba2Spec):
                rule = reference_recurrence.mamba2
            found = of_pass(rule, self.projected, self.gates, states, 0, self.spec, self.weights)
        return found, after

    def start(self) -> MlxBuffer:
        buffer, first, parts = MlxBuffer(0), 0, []
        for shape in state_shapes(self.spec):
            size = math.prod(shape)
            parts.append(mx.array(self.state[first : first + size].reshape(shape)))
            first += size
        buffer.arrays[0] = tuple(parts)
        return buffer

    def passed(
        self, rows: list[int], before: MlxBuffer, ahead: Ahead | None = None
    ) -> tuple[np.ndarray, MlxBuffer]:
        after = MlxBuffer(0)
        states = SimpleNamespace(
            state=partial(Slot, before), next_state=partial(Slot, after), ahead=lambda layer: ahead
        )
        x = mx.array(self.projected[rows])
        if isinstance(self.spec, ConvSpec):
            found = MlxOps().short_conv(x, states, 0, self.spec, self.own_weights)
        else:
            op = MlxOps().mamba2 if isinstance(self.spec, Mamba2Spec) else MlxOps().gated_delta
            found = op(x, mx.array(self.gates[rows]), states, 0, self.spec, self.own_weights)
        return np.array(found), after


def held(buffer: MlxBuffer) -> np.ndarray:
    return np.concatenate([np.array(part).reshape(-1) for part in buffer.arrays[0]])


@pytest.mark.parametrize("spec", [*DELTAS, *CONVS, *MIXERS], ids=repr)
def test_a_rule_is_that_of_reference_in_passes_of_any_size(spec: RecurrentSpec) -> None:
    rule = Rule(spec)
    theirs, state = rule.reference()
    whole, after = rule.passed(list(range(LENGTH)), rule.start())
    assert error(whole, theirs) < (2e-2 if ON_GPU else 1e-5)
    assert error(held(after), state) < (2e-2 if ON_GPU else 1e-5)
    for step in (1, 7, RULE_TOKENS):
        at, found = rule.start(), []
        for first in range(0, LENGTH, step):
            rows = list(range(first, min(LENGTH, first + step)))
            own, at = rule.passed(rows, at)
            found.append(own)
        assert np.concatenate(found).tobytes() == whole.tobytes(), step
        assert held(at).tobytes() == held(after).tobytes(), step


@pytest.mark.parametrize("spec", [DELTAS[1], CONVS[0], *MIXERS[1:]], ids=repr)
def test_nodes_of_a_tree_have_the_bits_of_their_paths(spec: RecurrentSpec) -> None:
    """In two passes, of which the second finds the first one's tokens ahead of the state."""
    rule, kept, first = Rule(spec), MlxBuffer(0), 3
    slots: Any = Slot(kept, "channels"), Slot(kept, "gates")
    chain = np.arange(-1, first - 1, dtype=np.int32)
    known, _ = rule.passed(list(range(first)), rule.start(), Ahead(*slots, chain))
    parents = np.concatenate([chain, TREE.parents + first]).astype(np.int32)
    rows = list(range(first, first + len(TREE)))
    found, after = rule.passed(rows, rule.start(), Ahead(*slots, parents))
    assert not after.arrays
    for node in range(len(TREE)):
        path = [*range(first), *(first + it for it in TREE.path(node))]
        at, own = rule.start(), []
        for row in path:
            alone_, at = rule.passed([row], at)
            own.append(alone_)
        assert own[-1].tobytes() == found[node : node + 1].tobytes(), node
        assert np.concatenate(own[:first]).tobytes() == known.tobytes()


@pytest.mark.parametrize(
    "spec", [DeltaSpec(2, 4, 64, 64), ConvSpec(2048, 3), Mamba2Spec(8, 64, 1, 32)], ids=repr
)
def test_a_state_holds_nothing_of_its_pass(spec: RecurrentSpec) -> None:
    """A view of what a pass computed would keep all of it for as long as a checkpoint lasts."""
    rule = Rule(spec)
    start = rule.start()
    mx.eval(rule.own_weights, start.arrays[0])
    before = mx.get_active_memory()
    after = rule.passed(list(range(LENGTH)), start)[1]
    mx.synchronize()
    taken = mx.get_active_memory() - before
    assert len(after.arrays[0]) == len(state_shapes(spec))
    assert 0.9 < taken / (4 * spec.state_floats) < 1.1


def made(folder: Path, case: str, quant: str = "q4", **options: Any) -> Path:
    if case in MODELS:
        return write_small(folder / "bundle", MODELS[case])
    family, own = CASES[case]
    write_model(folder / "source", family, {**own, "vocab_size": 320, **options})
    write_byte_tokenizer(folder / "source")
    return convert(folder / "source", folder / case.replace(" ", "-"), quant)


@pytest.mark.parametrize(("case", "quant"), [
    ("qwen3.5 moe", "q8"), pytest.param("qwen3.5", "f16", marks=pytest.mark.slow),
    pytest.param("lfm2", "q4", marks=pytest.mark.slow),
    pytest.param("lfm2", "f16", marks=pytest.mark.slow),
    pytest.param("qwen3 next", "q4", marks=pytest.mark.slow),
    pytest.param("qwen3.5 wide states", "q5", marks=pytest.mark.slow),
    pytest.param("mixers", "q4", marks=pytest.mark.slow), ("mixers beside attention", "q4"),
    *(pytest.param(case, "q8", marks=pytest.mark.slow) for case in MIXER_CASES),
])  # fmt: skip
def test_logits_are_those_of_reference(tmp_path: Path, case: str, quant: str) -> None:
    folder = made(tmp_path, case, quant)
    tokens = random_tokens(Bundle.open(folder).config, 120)
    with loaded(folder, "reference") as reference:
        theirs = reference.logits(tokens)
    with loaded(folder, prefill_chunk=37) as model:
        found = error(model.logits(tokens), theirs)
        print(f"{case} {quant}: {found:.1e}")
        assert found < TOLERANCE


SMALL_STATES = {"nemotron h moe": {"ssm_state_size": 4}, "granite hybrid": {"mamba_d_state": 4}}
"""Sizes with which the prompts have a checkpoint."""
HYBRIDS = [
    "qwen3.5 moe",
    "nemotron h moe",
    *(pytest.param(it, marks=pytest.mark.slow) for it in ("lfm2", "qwen3.5", "granite hybrid", "falcon h1")),
]


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("hybrid"), request.param, **SMALL_STATES.get(request.param, {}))


BIAS: dict[str, Any] = {"logit_bias": {2: -math.inf, EOS: -math.inf}}
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 5}]


@pytest.mark.fast("nemotron h moe")
@on_cpu
def test_no_setting_changes_the_text(hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of all sizes, in the smallest budget, with trees of drafts, from a prompt cache."""
    with loaded(hybrid) as model:
        expected = said(model)[0]
        texts = [model.generate("Hello, hello", max_tokens=12, **BIAS, **it).tokens for it in SAMPLINGS]
        spacing = model._engine.kv.layout.states.spacing
        requests = asked(model, 4)
        apart = alone(model, requests)
    with loaded(hybrid, prefill_chunk=7, dram_budget=smallest(hybrid), prompt_cache=tmp_path) as model:
        assert said(model) == (expected, 0)
        settle(model)
        assert written(tmp_path)
    with loaded(hybrid, prefill_chunk=7, prompt_cache=tmp_path) as model:
        assert said(model) == (expected, (len(PROMPT) - 1) // spacing * spacing)
    with loaded(hybrid, speculation="lookup") as model:
        model._engine.draft_with("off", None)
        for scripted, _ in drafted(model, "Hello, hello", SAMPLINGS, texts, **BIAS):
            assert sum(scripted.sizes) > 16
    always_draft(monkeypatch, [9, 3, 16])
    with loaded(hybrid, speculation="lookup", parallel=3, prefill_chunk=16) as model:
        assert together(model, requests) == apart


@pytest.mark.slow
@on_cpu
def test_a_chat_goes_on_and_goes_back(hybrid: Path, tmp_path: Path) -> None:
    def reply(session: ondevice.Session, text: str) -> tuple[int, ...]:
        return tuple(session.respond(text, max_tokens=10, logit_bias={EOS: -math.inf}).tokens)

    with loaded(hybrid) as model:
        session = model.session("Be brief. " * 12)
        first = reply(session, "Hello")
        branch = session.fork()
        second = reply(session, "And again")
        assert reply(branch, "And again") == second
        session.save(tmp_path / "talk.json")
        third = reply(session, "And so on")
        states = model._engine.kv
        assert states.nbytes == sum(kv.nbytes for kv in states.of_sessions.values())
    with loaded(hybrid) as model:
        session = model.session()
        session.load(tmp_path / "talk.json")
        assert reply(session, "And so on") == third
        again = model.session("Be brief. " * 12)
        assert reply(again, "Hello") == first


def test_states_lie_in_files_as_those_of_cpu_do(hybrid: Path) -> None:
    layout = KVLayout(Bundle.open(hybrid).config, 16).states
    memory, data = MlxStates(layout), np.zeros(layout.nbytes, np.uint8)
    for layer in layout.config.recurrent_layers:
        own = layout.of(data, layer)
        own[:] = np.random.default_rng(layer).standard_normal(len(own))
    buffer = memory.new_buffer(lambda nbytes: None, layout.nbytes)
    memory.load(buffer, lambda target: target.__setitem__(slice(None), data))
    assert memory.data(buffer).tobytes() == data.tobytes()


OPS = {
    "qwen3.5": "delta rule of 4 heads",
    "lfm2": "short convolution",
    "granite": "mixer of 8 heads, norm after",
    "nemotron": "mixer of 8 heads, norm after",
    "falcon": "mixer of 6 heads, norm none",
}
"""Op of each hybrid's states."""


@pytest.mark.usefixtures("rows_measured_anew")
def test_each_op_is_measured(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if ON_GPU:
        run_every_op(monkeypatch)
    bundle = Bundle.open(hybrid)
    found = backend_choice.row_invariance(bundle.config, bundle.quant, RuntimeConfig(backend="mlx")).ops
    name = OPS[hybrid.name.partition("-")[0]]
    assert {f"{name}, {kind}" for kind in ("chain", "tree")} <= set(found)
    assert any(it.startswith("attention, tree") for it in found)
    assert any(name.startswith("gates of") for name in found) == ("qwen" in hybrid.name)
    if bundle.config.is_sliced:
        bits = bundle.quant.of("down", 0).bits
        down = f"down projection of {bundle.neuron_layouts[0].neurons} neurons, {bits}-bit"
        assert [name for name in found if name.startswith("down")] == [down]
    assert ON_GPU or set(found.values()) == {16}


WIDE = {
    "qwen3.5": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "nemotron h": {"mamba_head_dim": 64, "ssm_state_size": 128},
    "falcon h1": {"mamba_d_ssm": 768, "mamba_n_heads": 12, "mamba_d_state": 64},
}


@pytest.mark.fast("qwen3.5")
@pytest.mark.parametrize("case", WIDE)
def test_what_the_rule_takes_is_what_is_planned(tmp_path: Path, case: str) -> None:
    folder, chunk = made(tmp_path, case, "q8", **WIDE[case]), 240
    with loaded(folder, max_context=512, prefill_chunk=chunk, sparsity="dense") as model:
        engine, plan = model._engine, model.plan
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        model.generate(tokens=random_tokens(model.config, 500), max_tokens=2)
        # Arrays are shared, so that states at marks take nothing of their own beside those of the last token.
        of_text = plan.kv_cache_bytes - recurrent.MARKS * engine.kv.layout.states.nbytes
        taken = mx.get_peak_memory() - before - of_text
        memory = MlxMemory(model.config, engine._bundle.quant, engine._runtime, operand_bytes=4)
        planned = memory.activation_bytes(chunk) - MLX_CACHE_BYTES
        print(f"{case}: {taken / planned:.2f} of {planned}")
        assert 0.3 * planned < taken < planned


@pytest.mark.fast("nemotron h moe")
@on_cpu
def test_only_whole_runs_are_restored(hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory a text goes back to its last prompt; what lies between checkpoints isn't written."""
    monkeypatch.setattr(recurrent, "MIN_SPACING", 512)
    with loaded(hybrid, prompt_cache=tmp_path) as model:
        session = model.session()
        answers = [session.respond("a" * 90, max_tokens=4, logit_bias={EOS: -math.inf})]
        session._messages = []
        answers.append(session.respond("a" * 90, max_tokens=4, logit_bias={EOS: -math.inf}))
        assert answers[0].tokens == answers[1].tokens
        first = answers[0].stats.prompt_tokens
        assert [it.stats.reused_tokens for it in answers] == [0, first - recurrent.PROMPT_TAIL]
        settle(model)
    assert not written(tmp_path)
