"""The layer that predicts one token more: read, equal to `transformers`, and no text depends on it.

`transformers` leaves the layer out; its own layer of attention with the layer's weights is the oracle.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ondevice as package
from ondevice.api import load
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.bundle.draft_layers import MTP_SIDECAR, DraftLayer
from ondevice.bundle.reader import Bundle
from ondevice.converters.convert import convert
from ondevice.converters.draft_layers.mtp import convert_mtp, has_layers_ahead
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.flash.reader import FlashReader
from ondevice.model.draft_layer import load_draft_layer
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.speculation.tree import DRAFT_NODES
from tests.support.bundles import EOS, copy_files, write_chat_checkpoint
from tests.support.chat import PROMPT
from tests.support.command_line import Run
from tests.support.engines import BackendName, always_draft, error, random_tokens, running
from tests.support.models import save_safetensors
from tests.support.mtp_checkpoints import change_config, mtp_logits, write_mtp_checkpoint

FED = [17, 33, 8]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `source` and `bundle`, at q4, whose layer has 8 bits."""
    folder = tmp_path_factory.mktemp("hybrid")
    write_mtp_checkpoint(folder / "source")
    convert(folder / "source", folder / "bundle", "q4")
    convert_mtp(folder / "source", folder / "bundle")
    return folder


@pytest.mark.fast("qwen3.5")
@pytest.mark.parametrize("case", ["qwen3.5", "qwen3.5 half turns"])
def test_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    """A text's rows in pieces, then three that go on from the layer's own output."""
    layer = check_family(tmp_path, case)
    assert (layer.output_gates, layer.states_normed, layer.head_norm) == (True, True, True)
    assert 0 < sum(it > 0 for it in layer.frequencies) < layer.head_dim // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "stacked"),
    [("qwen3.5 moe", True), ("qwen3 next", False), ("glm4 moe head norms", False)],
)
def test_experts_give_the_logits_of_transformers(tmp_path: Path, case: str, stacked: bool) -> None:
    """Chosen by softmax beside a gated shared expert, or by sigmoids with a bias, and attention's biases."""
    layer = check_family(tmp_path, case, stacked)
    assert layer.experts is not None
    assert (layer.experts.count, layer.experts.chosen, layer.neurons) == (8, 3, 96 if "glm" in case else 72)
    assert layer.experts.shared_gate == layer.output_gates == (not layer.qkv_bias) == ("glm" not in case)


@pytest.mark.fast("deepseek v3 moe halves", "glm4 moe lite")
@pytest.mark.parametrize("case", ["deepseek v3 moe", "deepseek v3 moe halves", "glm4 moe lite"])
def test_latent_attention_gives_the_logits_of_transformers(tmp_path: Path, case: str) -> None:
    """With queries of their own rank or of the input, in groups of experts, and scores scaled by yarn."""
    layer = check_family(tmp_path, case)
    assert layer.latent is not None
    assert layer.experts is not None
    assert (layer.latent.query_rank > 0) == ("halves" not in case)
    assert (layer.experts.groups > 1) == ("deepseek" in case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mimo v2 moe", "mimo v2 moe wide", "mimo v2 moe plain"])
def test_the_first_of_several_gives_the_logits_of_transformers(tmp_path: Path, case: str) -> None:
    """A dense layer with a window and sinks, values narrower than keys in two, beside two more layers."""
    layer = check_family(tmp_path, case)
    assert (layer.window, layer.sinks, layer.experts, layer.states_normed) == (9, True, None, False)
    assert layer.value_dim == {"mimo v2 moe": 16, "mimo v2 moe wide": 40, "mimo v2 moe plain": 0}[case]
    assert (layer.out_factor == 1.0) == layer.qkv_bias == ("plain" in case)
    assert layer.num_kv_heads == (2 if "wide" in case else 4)


def check_family(folder: Path, case: str, stacked: bool = False) -> DraftLayer:
    model = write_mtp_checkpoint(folder / "source", case, stacked)
    bundle = convert(folder / "source", folder / "bundle", "f16")
    layer = convert_mtp(folder / "source", bundle, 16)
    backends: tuple[BackendName, ...] = ("reference", "cpu")
    for backend in backends:
        check_logits(folder / "source", model, bundle, backend)
    return layer


def check_logits(source: Path, model: Any, folder: Path, backend: BackendName) -> None:
    torch = pytest.importorskip("torch")
    opened, kv_bits = Bundle.open(folder), 32 if backend == "reference" else 16
    bits: Literal[32, 16] = 32 if kv_bits == 32 else 16
    assert opened.mtp is not None
    with running(folder, backend) as transformer:
        transformer.taps = opened.mtp.taps
        tokens, own_backend = random_tokens(transformer.config, 40), transformer.backend
        output = transformer.run(ForwardBatch(tokens), SequenceState(KVLayout(transformer.config, bits)))
        with FlashReader([opened.sidecar_file(MTP_SIDECAR.tensors)], "buffered") as reader:
            layer = load_draft_layer(opened, opened.mtp, reader, own_backend, transformer.weights, 256)
        mixed = layer.mixed(output.tapped)
        states = np.array(own_backend.to_numpy(mixed))
        own, rows, found = SequenceState(KVLayout(layer.config, bits)), tokens[1:], []
        for start, stop in ((0, 1), (1, 20), (20, len(rows))):
            hidden = layer.run(rows[start:stop], own_backend.rows(mixed, range(start, stop)), own)
            found.append(layer.logits(hidden))
        for token in FED:
            hidden = layer.run([token], own_backend.rows(hidden, [hidden.shape[0] - 1]), own)
            found.append(layer.logits(hidden))
    if backend == "reference":
        # What goes in is what leaves the model's last norm, or what this is given.
        entered: list[Any] = []
        model.model.norm.register_forward_hook(lambda norm, given, normed: entered.append(given[0][0]))
        with torch.no_grad():
            normed = model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        expected = (normed if opened.mtp.states_normed else entered[0]).numpy()
        assert error(states, expected) < 1e-3
    before = states[:-1]
    after, logits = mtp_logits(source, model, rows, before)
    for count in range(1, len(FED) + 1):
        before = np.vstack([before, after[-1:]])
        after, logits = mtp_logits(source, model, [*rows, *FED[:count]], before)
    assert error(np.concatenate(found), logits) < 1e-3


def test_no_token_depends_on_drafts(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, bias = hybrid / "bundle", {EOS: -math.inf}
    always_draft(monkeypatch, [DRAFT_NODES, 3])
    samplings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "top_p": 0.9, "seed": 5},
        {"temperature": 1.2, "repetition_penalty": 1.2, "seed": 7},
    ]
    with load(bundle, speculation="off", threads=1) as plain:
        expected = [plain.generate(PROMPT, max_tokens=20, logit_bias=bias, **it).tokens for it in samplings]
    plan = package.inspect(bundle, speculation="mtp")
    ways: list[dict[str, Any]] = [
        {"threads": 2},
        {"prefill_chunk": 7, "threads": 1},
        {"dram_budget": plan.minimum_budget_bytes + (4 << 20)},
        {"parallel": 2},
    ]
    for way in ways:
        with load(bundle, speculation="mtp", **way) as model:
            for sampling, tokens in zip(samplings, expected, strict=True):
                found = model.generate(PROMPT, max_tokens=20, logit_bias=bias, **sampling)
                assert found.tokens == tokens, way
                assert found.stats.speculation == "mtp"
                assert found.stats.drafting.draft_tokens > 15


@pytest.mark.slow
@pytest.mark.fast("glm4 moe lite-cpu")
@pytest.mark.parametrize(
    ("case", "backend"),
    [
        ("qwen3.5 moe", "cpu"),
        ("glm4 moe lite", "cpu"),
        ("glm4 moe head norms", "mlx"),
        ("mimo v2 moe wide", "cpu"),
        ("mimo v2 moe", "mlx"),
        pytest.param("glm4 moe head norms", "cpu", marks=pytest.mark.slow),
    ],
)
def test_no_token_depends_on_drafts_of_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, case: str, backend: str
) -> None:
    """In memory for everything, and in the smallest budget, of which the layer's experts have their share;
    one layer has latent attention too, and two are MiMo's, dense beside a model's experts.
    """
    if backend == "mlx":
        pytest.importorskip("mlx.core", exc_type=ImportError)
        request.getfixturevalue("mlx_on_cpu")
    write_mtp_checkpoint(tmp_path / "source", case)
    bundle = convert(tmp_path / "source", tmp_path / "bundle", "q8")
    assert (convert_mtp(tmp_path / "source", bundle, 4).experts is None) == ("mimo" in case)
    always_draft(monkeypatch, [6, 3])
    given: dict[str, Any] = {"max_tokens": 32, "logit_bias": {EOS: -math.inf}, "seed": 5}
    temperatures = (0.9, 0.0)
    with load(bundle, speculation="off", backend=backend) as plain:
        expected = [plain.generate(PROMPT, temperature=it, **given).tokens for it in temperatures]
    least = package.inspect(bundle, speculation="mtp", backend=backend).minimum_budget_bytes
    ways: list[dict[str, Any]] = [{"prefill_chunk": 7}, {"dram_budget": least + (2 << 20)}]
    for way in ways:
        with load(bundle, speculation="mtp", backend=backend, **way) as model:
            for temperature, tokens in zip(temperatures, expected, strict=True):
                found = model.generate(PROMPT, temperature=temperature, **given)
                assert found.tokens == tokens, way
                assert found.stats.drafting.draft_tokens > 20


def test_a_chat_goes_on_and_back_with_drafts(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch, [6])
    talks = []
    for speculation in ("off", "mtp"):
        with load(hybrid / "bundle", speculation=speculation) as model:
            session = model.session()
            options: dict[str, Any] = {"max_tokens": 12, "logit_bias": {EOS: -math.inf}}
            replies = [session.respond(it, **options) for it in ("A", "B")]
            branch = session.fork()
            replies += [it.respond("C", **options) for it in (branch, session)]
            talks.append([it.tokens for it in replies])
    assert talks[0] == talks[1]


def test_the_plan_counts_the_layer(hybrid: Path) -> None:
    """With all that it holds: at least its file, whose matrices memory has too."""
    bundle = hybrid / "bundle"
    off, mtp = (package.inspect(bundle, speculation=it) for it in ("off", "mtp"))
    assert mtp.draft_bytes - off.draft_bytes > (bundle / MTP_SIDECAR.tensors).stat().st_size * 0.9


def test_the_command_adds_it_and_the_note_says_how(hybrid: Path, tmp_path: Path, ondevice: Run) -> None:
    found = ondevice("convert", hybrid / "source", "-o", tmp_path / "bundle", "--quant", "q4")
    assert found.code == 0, found.err
    assert "`ondevice convert CHECKPOINT --draft-for BUNDLE` adds it" in found.err
    found = ondevice("convert", hybrid / "source", "--draft-for", tmp_path / "bundle", "--quant", "f16")
    assert found.code == 0, found.err
    assert "--speculation mtp drafts with it" in found.err
    opened = Bundle.open(tmp_path / "bundle")
    assert opened.mtp is not None
    assert opened.mtp.bits == 16


def test_a_checkpoint_beside_other_towers_is_read(hybrid: Path, tmp_path: Path) -> None:
    """As published ones are: in bfloat16, the text's config a section, its tensors under another name."""
    source = copy_files(hybrid / "source", tmp_path / "source")
    text = json.loads((source / "config.json").read_text())
    names = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
    (source / "config.json").write_text(json.dumps({**names, "text_config": text}))
    tensors = load_file(source / "model.safetensors")
    moved = {it.replace("model.", "model.language_model.", 1): values for it, values in tensors.items()}
    save_safetensors(source / "model.safetensors", moved, "BF16")
    bundle = copy_files(hybrid / "bundle", tmp_path / "bundle")
    before = (bundle / MTP_SIDECAR.tensors).read_bytes()
    (bundle / MTP_SIDECAR.tensors).unlink()
    (bundle / MTP_SIDECAR.manifest).unlink()
    assert has_layers_ahead(source)
    convert_mtp(source, bundle)
    assert (bundle / MTP_SIDECAR.tensors).read_bytes() == before


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"mtp_num_hidden_layers": 2}, UnsupportedModelError, "mtp_num_hidden_layers is 2"),
        ({"mtp_use_dedicated_embeddings": True}, UnsupportedModelError, "embeddings of the layer's own"),
        ({"intermediate_size": 72}, CheckpointError, "intermediate_size is 72"),
        ({"rms_norm_eps": "x"}, CheckpointError, "rms_norm_eps"),
    ],
)
def test_what_is_not_there_is_refused(
    hybrid: Path, tmp_path: Path, change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    source = copy_files(hybrid / "source", tmp_path / "source")
    change_config(source, **change)
    assert has_layers_ahead(source)
    with pytest.raises(kind, match=message):
        convert_mtp(source, copy_files(hybrid / "bundle", tmp_path / "bundle"))


def test_damaged_tensors_are_refused(hybrid: Path, tmp_path: Path) -> None:
    bundle = copy_files(hybrid / "bundle", tmp_path / "bundle")
    before = (bundle / MTP_SIDECAR.manifest).read_bytes()
    tensors, norm = load_file(hybrid / "source" / "model.safetensors"), "mtp.norm.weight"
    model = {name: it for name, it in tensors.items() if not name.startswith("mtp.")}
    cases = [
        (model, CheckpointError, "has no tensors mtp"),
        ({it: values for it, values in tensors.items() if it != norm}, CheckpointError, "are missing"),
        (
            tensors | {"mtp.layers.1.x": tensors[norm]},
            UnsupportedModelError,
            r"one token more, mtp\.layers\.1\.x",
        ),
        (tensors | {norm: tensors[norm][:-1]}, CheckpointError, "has shape"),
        (tensors | {norm: tensors[norm] * np.float32(np.nan)}, CheckpointError, "holds NaN"),
        (
            tensors | {"mtp.fc.weight": tensors["mtp.fc.weight"][:, 1:].copy()},
            CheckpointError,
            r"^mtp\.fc\.weight",
        ),
    ]
    q_proj = "mtp.layers.0.self_attn.q_proj.weight"
    cases.append((tensors | {q_proj: tensors[q_proj][1:].copy()}, CheckpointError, "has shape"))
    for at, (changed, kind, message) in enumerate(cases):
        source = copy_files(hybrid / "source", tmp_path / f"source{at}")
        save_file(changed, source / "model.safetensors")
        with pytest.raises(kind, match=message):
            convert_mtp(source, bundle)
    assert (bundle / MTP_SIDECAR.manifest).read_bytes() == before


def test_damaged_layers_behind_the_last_are_refused(tmp_path: Path) -> None:
    """Of experts, and of tensors that the layer shares with the model; what was there before stays."""
    write_mtp_checkpoint(tmp_path / "source", "glm4 moe lite")
    bundle = convert(tmp_path / "source", tmp_path / "bundle", "q8")
    convert_mtp(tmp_path / "source", bundle)
    before = (bundle / MTP_SIDECAR.manifest).read_bytes()
    tensors, own = load_file(tmp_path / "source" / "model.safetensors"), "model.layers.3."
    down, gate, up = (f"{own}mlp.experts.{it}_proj.weight" for it in ("7.down", "0.gate", "3.up"))
    table, head = f"{own}embed_tokens.weight", f"{own}shared_head.head.weight"
    further, gone = f"{own}mlp.experts.8.up_proj.weight", f"are missing, {re.escape(down)} first"
    model = {name: it for name, it in tensors.items() if not name.startswith(own)}
    norm, wrong = f"{own}post_attention_layernorm.weight", np.zeros_like(tensors[table])
    bad = tensors[up].copy()
    bad[1, 2] = np.nan
    cases = [
        (model, CheckpointError, r"has no tensors model\.layers\.3\."),
        ({it: values for it, values in tensors.items() if it != down}, CheckpointError, gone),
        (tensors | {gate: tensors[gate][1:].copy()}, CheckpointError, f"{re.escape(gate)} has shape"),
        ({it: values for it, values in tensors.items() if it != norm}, CheckpointError, r"missing, post_att"),
        (tensors | {up: bad}, CheckpointError, "holds NaN"),
        (tensors | {table: wrong}, UnsupportedModelError, "embed_tokens.weight isn't the model's"),
        (tensors | {head: tensors[head][:-1].copy()}, UnsupportedModelError, "head.weight isn't the model's"),
        (tensors | {further: tensors[up]}, UnsupportedModelError, f"no part of .*, {re.escape(further)}"),
    ]
    for changed, kind, message in cases:
        save_file(changed, tmp_path / "source" / "model.safetensors")
        with pytest.raises(kind, match=message):
            convert_mtp(tmp_path / "source", bundle)
    change_config(tmp_path / "source", num_nextn_predict_layers=2)
    with pytest.raises(UnsupportedModelError, match="num_nextn_predict_layers is 2"):
        convert_mtp(tmp_path / "source", bundle)
    assert (bundle / MTP_SIDECAR.manifest).read_bytes() == before


def test_families_without_such_a_layer_are_named(hybrid: Path, tmp_path: Path) -> None:
    source = write_chat_checkpoint(tmp_path / "source")
    with pytest.raises(UnsupportedModelError, match=r"model_type is llama; .* are read from Qwen3-Next"):
        convert_mtp(source, hybrid / "bundle")
