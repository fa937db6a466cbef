"""Every family against `transformers` in float32: random tiny models, saved, converted, run.

`transformers` holds weights that float16 holds exactly, so `reference` differs from it in the order of sums
alone, and `cpu` in that and in how it rounds activations to eight bits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ondevice
from ondevice.backends.cpu import make_runner
from ondevice.backends.kv_layout import KVLayout
from ondevice.bundle.layout import EMBEDDING, PER_LAYER
from ondevice.bundle.reader import Bundle
from ondevice.config import QuantConfig
from ondevice.converters.architectures.registry import read_config
from ondevice.converters.checkpoints.huggingface import open_huggingface
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.converters.checkpoints.source_folder import SourceFolder
from ondevice.converters.convert import convert
from ondevice.converters.quantize import RoundedRows
from ondevice.converters.reading import read_blocks
from ondevice.converters.rounding.layers import LayerRounding
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import Transformer
from tests.support.engines import BackendName, all_logits, running
from tests.support.families import CASES, write_model
from tests.support.models import write_checkpoint

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Gives a case's model and its f16 bundle, made once."""
    made: dict[str, tuple[Any, Path]] = {}

    def of(case: str) -> tuple[Any, Path]:
        if case not in made:
            folder = tmp_path_factory.mktemp("family")
            model = write_model(folder / "source", *CASES[case])
            made[case] = model, convert(folder / "source", folder / "bundle", "f16")
        return made[case]

    return of


def text_of(name: str, prefix: str) -> str:
    """A text model's tensor as a checkpoint with a vision tower names it, now or by older releases."""
    if prefix == "model.language_model.":
        return name.replace("model.", prefix, 1) if name.startswith("model.") else name
    return f"{prefix}{name}"


@pytest.mark.fast("gemma4 unified-*-model*", "llama-outer5-language_model.")
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model."])
@pytest.mark.parametrize(
    ("case", "outer"),
    [
        ("gemma3", ("gemma3", "Gemma3ForConditionalGeneration")),
        ("gemma3n", ("gemma3n", "Gemma3nForConditionalGeneration")),
        ("gemma4 e", ("gemma4", "Gemma4ForConditionalGeneration")),
        ("gemma4 unified", ("gemma4_unified", "Gemma4UnifiedForConditionalGeneration")),
        ("mistral", ("mistral3", "Mistral3ForConditionalGeneration")),
        ("llama", ("llava", "LlavaForConditionalGeneration")),
    ],
)
def test_a_text_model_among_other_towers_converts_as_by_itself(
    family: Any, tmp_path: Path, case: str, outer: tuple[str, str], prefix: str
) -> None:
    """Its bundle is that of the text model by itself, and says that the rest was left out."""
    if case not in CASES:
        source = write_checkpoint(tmp_path / "text", case)
        alone = convert(source, tmp_path / "alone", "f16")
    else:
        alone = family(case)[1]
        source = alone.parent / "source"
    folder = tmp_path / "towers"
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    towers = {text_of(name, prefix): values for name, values in tensors.items()}
    for name in ("vision_tower.layer.weight", "multi_modal_projector.linear.weight"):
        towers[f"model.{name}" if prefix.startswith("model.") else name] = np.ones((3, 5), np.float32)
    save_file(towers, folder / "model.safetensors")
    values = {
        "model_type": outer[0],
        "architectures": [outer[1]],
        "text_config": json.loads((source / "config.json").read_text()),
        "vision_config": {"hidden_size": 5, "model_type": "siglip_vision_model"},
        "image_token_index": 7,
    }
    (folder / "config.json").write_text(json.dumps(values))
    bundle = Bundle.open(convert(folder, tmp_path / "bundle", "f16"))
    assert bundle.config == Bundle.open(alone).config
    assert any("text model alone" in note for note in bundle.manifest.provenance.notes)
    for file in ("resident.safetensors", "embedding.safetensors", "neurons-00000.safetensors"):
        assert (bundle.path / file).read_bytes() == (alone / file).read_bytes()
    values["audio_multiplier"] = 2.0
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedModelError, match="audio_multiplier"):
        open_huggingface(SourceFolder(folder))


def tokens() -> list[int]:
    return np.random.default_rng(5).integers(0, 256, 40).tolist()


def expected(model: Any, text: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([text])).logits[0].numpy()


FURTHER = (
    *("nemotron wide heads", "phimoe longrope", "granite tied", "gemma3n", "gemma3n own keys"),
    *("gemma3n mostly shared", "gemma4 e", "gemma4 e wide", "gemma4 e joint values"),
)
"""Cases in which `cpu` is 1.01e-3 to 1.87e-3 of the largest logit away, with keys and values of 16 bits; by
`reference`, with 32, 1e-6.
"""


ONE_OF_EACH_BLOCK = (
    *("gemma", "gemma2 low caps", "gemma3", "gemma3n", "gemma4", "gemma4 e wide", "gemma4 moe"),
    *("gemma4 unified", "phi3 longrope", "glm4", "smollm3", "granite", "stablelm parallel", "falcon"),
    *("falcon newer", "phi", "persimmon", "nemotron", "llama dynamic", "olmo2", "olmoe", "qwen3 moe"),
    *("mixtral", "phimoe", "granite moe", "qwen2 moe", "glm4 moe", "gpt-oss moe", "deepseek v2 moe"),
    *("deepseek v3 moe wide", "glm4 moe lite", "mimo v2 moe", "qwen3 next dense", "qwen3.5", "qwen3.5 moe"),
    *("lfm2", "lfm2 moe", "granite hybrid", "granite hybrid moe", "nemotron h", "nemotron h moe"),
    *("falcon h1", "opt", "opt norms behind"),
)
"""Every family, and of some families a case of each kind of block."""


@pytest.mark.fast(
    *(f"reference-{case}" for case in ONE_OF_EACH_BLOCK),
    *("cpu-gemma2 low caps", "cpu-gemma4 e wide", "cpu-qwen3.5 moe", "cpu-lfm2", "cpu-opt", "cpu-falcon h1"),
    *("cpu-mimo v2 moe", "cpu-deepseek v2 moe", "cpu-phi3 longrope"),
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_logits_are_those_of_transformers(family: Any, case: str, backend: BackendName) -> None:
    limit = 2e-3 if backend == "cpu" and case in FURTHER else 1e-3
    model, bundle = family(case)
    theirs = expected(model, tokens())
    with running(bundle, backend) as loaded:
        mine = all_logits(loaded, tokens(), 32 if backend == "reference" else 16)
    assert np.abs(mine - theirs).max() < limit * np.abs(theirs).max()
    assert np.abs(theirs).max() > 0.05


def on_grid(values: Any, axis: int) -> Any:
    """Weights near `values` that 4 bits hold exactly, in groups of 64 along `axis`, and 8 bits too.

    Of a group's 16 codes the first and the last occur, and steps are 17 times a power of two.
    """
    moved = np.moveaxis(values.numpy(), axis, -1)
    groups = [moved[..., start : start + 64] for start in range(0, moved.shape[-1], 64)]
    found = []
    for group in groups:
        low, high = group.min(-1, keepdims=True), group.max(-1, keepdims=True)
        step = np.where(low == high, 1.0, (high - low) / 15)
        exact = 17 * 2.0 ** np.round(np.log2(step / 17))
        found.append(np.where(low == high, 0.0, (np.rint((group - low) / step) - 8) * exact))
    return torch.from_numpy(np.moveaxis(np.concatenate(found, -1), -1, axis).astype(np.float32))


UNSCALED: dict[str, dict[str, Any]] = {
    "granite": {"residual_multiplier": 1.0},
    "granite hybrid": {"residual_multiplier": 1.0},
    "granite hybrid moe": {"residual_multiplier": 1.0},
    "falcon h1": {"mlp_multipliers": [0.88, 0.88]},
    "falcon h1 norm": {"mlp_multipliers": [0.88, 0.88]},
}
"""What keeps matrices as they are, where a case's factors would move their values."""
DOWN = ("down_proj", "fc2", "output_linear", "dense_4h_to_h", "w2.")


def put_on_grid(model: Any, is_sliced: bool) -> None:
    """Give a model matrices that 4 bits hold exactly, in groups along what their bundle has them along.

    is_sliced: whether the bundle has its feed-forwards in slices.
    """
    config = model.config
    for name, weights in model.named_parameters():
        if weights.ndim < 2 or name.endswith("_bias"):
            continue
        is_expert = ".experts." in name
        # Experts and slices have groups along their inputs, other down projections along their outputs.
        if is_expert:
            axis = -2 if config.model_type == "gpt_oss" else -1
        else:
            axis = -2 if not is_sliced and any(part in name for part in DOWN) else -1
        if name.endswith("kv_b_proj.weight"):
            # What makes a head's keys is held transposed.
            heads = weights.view(config.num_attention_heads, -1, config.kv_lora_rank)
            keys = heads[:, : config.qk_nope_head_dim]
            values = heads[:, config.qk_nope_head_dim :]
            keys.copy_(on_grid(keys, 1))
            values.copy_(on_grid(values, 2))
        else:
            weights.copy_(on_grid(weights, axis))


ONE_OF_EACH = sorted({family: case for case, (family, _) in reversed(CASES.items())}.values())


@pytest.mark.fast("gpt-oss moe", "deepseek v2 moe")
@pytest.mark.parametrize("case", [*ONE_OF_EACH, "gemma4 e", "granite hybrid moe", "falcon h1 norm"])
def test_quantised_logits_are_those_of_transformers_on_the_values_of_the_codes(
    tmp_path: Path, case: str
) -> None:
    """Rounding loses nothing of such weights, so that what is left is how codes are stored and read."""
    family, options = CASES[case]
    model = write_model(tmp_path / "source", family, {**options, **UNSCALED.get(case, {})})
    with torch.no_grad():
        put_on_grid(model, open_checkpoint(tmp_path / "source").config.is_sliced)
    model.save_pretrained(tmp_path / "source")
    theirs = expected(model, tokens())
    for quant in ("q4", "q8"):
        with running(convert(tmp_path / "source", tmp_path / quant, quant), "reference") as loaded:
            mine = all_logits(loaded, tokens(), 32)
        assert np.abs(mine - theirs).max() < 1e-5 * np.abs(theirs).max(), quant


@pytest.mark.fast(
    *("gemma2 low caps", "gemma3", "glm4", "olmo2", "stablelm parallel", "opt", "opt norms behind", "phi"),
    *("persimmon", "gemma3n", "gemma4", "gemma4 e wide", "granite hybrid", "nemotron h", "falcon h1"),
)
@pytest.mark.parametrize(
    "case",
    [
        *("gemma2 low caps", "gemma3", "glm4", "olmo2", "stablelm parallel", "opt", "phi", "persimmon"),
        *(
            "opt norms behind",
            "opt no last norm",
            "gemma3n",
            "gemma3n mostly shared",
            "gemma4",
            "gemma4 e wide",
        ),
        *("granite hybrid", "nemotron h", "falcon h1"),
    ],
)
def test_a_text_is_run_through_every_kind_of_block(family: Any, case: str) -> None:
    """As the model runs it, before the weights are rounded by it."""
    _, bundle = family(case)
    checkpoint = open_checkpoint(bundle.parent / "source")
    rounding = LayerRounding(checkpoint, QuantConfig(), [tokens()], make_runner(1), lambda step: None)
    for layer in range(checkpoint.config.num_layers):
        rounding.layer(layer, wanted=False)
    with running(bundle, "cpu") as loaded:
        kv = SequenceState(KVLayout(checkpoint.config, 16))
        theirs = np.array(loaded.hidden_states(tokens(), kv))
        mine = loaded.merge_residuals(rounding.residuals[0])
    assert np.abs(mine - theirs).max() < 1e-3 * np.abs(theirs).max()
    checkpoint.close()


@pytest.mark.fast("gemma3", "glm4", "opt", "phi", "persimmon", "granite hybrid", "nemotron h", "falcon h1")
@pytest.mark.parametrize(
    "case",
    [
        *("gemma3", "glm4", "opt", "phi", "persimmon", "gemma3n mostly shared", "gemma4 e joint values"),
        *("granite hybrid", "nemotron h", "falcon h1"),
    ],
)
def test_a_text_rounds_every_matrix_of_every_kind_of_block(family: Any, case: str) -> None:
    """What is read for the bundle is all rounded by the text, whatever a checkpoint calls its tensors.

    But for tables, whose rows nothing multiplies, and what time steps are made of, which has 16 bits.
    """
    checkpoint = open_checkpoint(family(case)[1].parent / "source")
    rounding = LayerRounding(checkpoint, QuantConfig(4), [tokens()], make_runner(1), lambda step: None)
    of_layers = [rounding.layer(layer) for layer in range(checkpoint.config.num_layers)]
    assert all(len(rounded) >= 4 for rounded in of_layers)
    rounded = {name: rows for found in (*of_layers, rounding.head()) for name, rows in found.items()}
    looked_up = (EMBEDDING, PER_LAYER)
    blocks = read_blocks(checkpoint, lambda file, tensor: file not in looked_up, QuantConfig(4), rounded)
    matrices = [rows for block in blocks for rows in block.rows if block.kinds and block.formats[0].bits < 16]
    assert all(isinstance(rows, RoundedRows) for rows in matrices)
    checkpoint.close()


@pytest.mark.fast(
    *("gemma2 low caps", "gemma3", "glm4", "olmo2", "stablelm parallel", "opt", "phi", "persimmon"),
    *("gemma3n", "gemma4", "gemma4 e wide", "opt norms behind"),
)
@pytest.mark.parametrize(
    "case",
    [
        *("gemma2 low caps", "gemma3", "glm4", "olmo2", "stablelm parallel", "opt", "phi", "persimmon"),
        *("gemma3n", "gemma3n mostly shared", "gemma4", "gemma4 e wide", "opt norms behind"),
        *("phi3", "gemma4 e joint values"),
    ],
)
def test_mlx_logits_are_those_of_transformers(family: Any, case: str) -> None:
    pytest.importorskip("mlx.core")
    from ondevice.backends.mlx_float import MlxFloatBackend
    from ondevice.backends.mlx_kv import MlxKV, no_block

    model, folder = family(case)
    theirs, bundle = expected(model, tokens()), Bundle.open(folder)
    with FlashReader(bundle_files(bundle)) as reader:
        backend = MlxFloatBackend()
        loaded = Transformer(bundle.config, backend, load_weights(bundle, reader, backend))
        layout = KVLayout(bundle.config, 32)
        kv = SequenceState(layout, no_block, arrays=MlxKV(layout))
        mine = np.array(loaded.logits(loaded.hidden_states(tokens(), kv)))
    assert np.abs(mine - theirs).max() < 1e-3 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("llama dynamic", "context ends at 512 tokens"),
        ("phi3 longrope", "--max-context above 128 tokens"),
        ("smollm3 yarn", ""),
    ],
)
def test_a_bundle_says_where_its_frequencies_would_change(family: Any, case: str, words: str) -> None:
    notes = Bundle.open(family(case)[1]).manifest.provenance.notes
    assert any(words in note for note in notes) == bool(notes) == bool(words)


@pytest.mark.fast("*-phi3 longrope")
@pytest.mark.parametrize("case", ["phi3 longrope", "phi3 partial"])
@pytest.mark.parametrize(("backend", "limit"), [("reference", 1e-3), ("cpu", 2e-3)])
def test_a_context_beyond_the_original_takes_long_frequencies(
    family: Any, case: str, backend: BackendName, limit: float
) -> None:
    """As `transformers` does for a text of that length, from its first token on, however it is chunked."""
    model, bundle = family(case)
    text = np.random.default_rng(6).integers(0, 256, 140).tolist()
    theirs = expected(model, text)
    config = Bundle.open(bundle).config
    assert (config.original_context, config.max_context) == (128, 512)
    kv_bits: Literal[32, 16] = 32 if backend == "reference" else 16
    with running(bundle, backend) as loaded:
        reach = Transformer(config.within(129), loaded.backend, loaded.weights)
        short = Transformer(config.within(128), loaded.backend, loaded.weights)
        mine = all_logits(reach, text, kv_bits)
        assert np.abs(all_logits(short, text, kv_bits) - theirs).max() > 1e-2 * np.abs(theirs).max()
        if backend == "cpu":
            chunked, kv = [], SequenceState(KVLayout(config, kv_bits))
            for begin in range(0, len(text), 35):
                states = reach.hidden_states(text[begin : begin + 35], kv)
                chunked.append(np.array(reach.logits(states)))
            assert np.array_equal(np.concatenate(chunked), mine)
    assert np.abs(mine - theirs).max() < limit * np.abs(theirs).max()


def test_max_context_chooses_the_frequencies(family: Any) -> None:
    """The default never passes the original context, so that no budget decides between the two."""
    bundle, text = family("phi3 longrope")[1], tokens()

    def scored(max_context: int = 0) -> tuple[int, float]:
        with ondevice.load(bundle, backend="cpu", max_context=max_context) as model:
            return model.plan.max_context, model.score(tokens=text).perplexity

    (context, plain), (_, within), (longest, beyond) = scored(), scored(64), scored(512)
    assert (context, longest) == (128, 512)
    assert plain == within != beyond


WITH_STATES = ("qwen3 next", "qwen3.5", "lfm2", "granite hybrid", "nemotron h", "falcon h1")
LATENT = ("deepseek v2", "deepseek v3", "glm4 moe lite")
NEAR_TIE = "deepseek v2 moe groups"
"""A router there chooses another expert by a near tie, which `test_expert_parity.py` counts apart."""


@pytest.mark.fast("nemotron h moe", "falcon h1", "qwen3.5 moe", "deepseek v3 moe wide", "lfm2")
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.startswith(WITH_STATES + LATENT) and case != NEAR_TIE]
)
def test_long_texts_stay_right(family: Any, case: str) -> None:
    """Errors of a state would add up."""
    model, bundle = family(case)
    text = np.random.default_rng(6).integers(0, 256, 300).tolist()
    theirs = expected(model, text)
    with running(bundle, "cpu") as loaded:
        mine = all_logits(loaded, text)
    assert np.abs(mine - theirs).max() < 1e-3 * np.abs(theirs).max()


@pytest.mark.fast(*ONE_OF_EACH_BLOCK)
@pytest.mark.parametrize("case", CASES)
def test_config_json_names_every_key_that_the_family_reads(family: Any, case: str, tmp_path: Path) -> None:
    """The keys that `transformers` writes are all known, and a new one is refused.

    `test_config_keys.py` has whether what is read means the same.
    """
    _, bundle = family(case)
    source = bundle.parent / "source"
    values = json.loads((source / "config.json").read_text())
    values["a_new_multiplier"] = 2.0
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="a_new_multiplier"):
        open_huggingface(SourceFolder(tmp_path))


def test_two_rotary_sections_that_differ_are_refused(family: Any) -> None:
    """`transformers` merges the older one into the newer; no published config has both."""
    _, folder = family("gemma3")
    values = json.loads((folder.parent / "source" / "config.json").read_text())
    same = values["rope_parameters"]["full_attention"]
    assert read_config(values | {"rope_scaling": same}) == read_config(values)
    with pytest.raises(CheckpointError, match="rope_scaling and rope_parameters"):
        read_config(values | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
