"""The plan against the system's own account of a process that runs a model of a hundred megabytes."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

from ondevice.budget.mlx_memory import MLX_LIBRARY_BYTES
from ondevice.bundle.reader import Bundle
from ondevice.config import QuantConfig
from ondevice.converters.training.predictors.layer_predictor import LayerPredictor
from ondevice.converters.training.predictors.operating_points import HeldBack
from ondevice.converters.training.predictors.train import store_predictor, write_predictors
from ondevice.model_config import NO_ATTENTION, Mamba2Spec
from tests.golden.build import golden_config
from tests.support.bundles import convert_bundle
from tests.support.made_up_streams import add_streams
from tests.support.models import save_safetensors, tensor_shapes, tiny_config
from tests.support.small_models import write_small

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "vocab_size": 16384,
    "max_position_embeddings": 1024,
}
QWEN3 = SHAPE | {
    "family": "qwen3",
    "intermediate_size": 2560,
    "num_hidden_layers": 20,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
}
PREDICTOR_RANK = ADAPTER_RANK = 512
LONG = [pytest.param(*case, marks=pytest.mark.slow) for case in (("smallest", 600, 20), ("8GB", 1000, 20))]
PROGRAM = """
import json, sys, ondevice
budget, prompt, options = sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
if budget.endswith("smallest"):
    times = float(budget.removesuffix("smallest") or 1)
    budget = int(times * ondevice.inspect(sys.argv[1], **options).minimum_budget_bytes)
with ondevice.load(sys.argv[1], dram_budget=budget, threads=1, **options) as model:
    for _ in range(int(sys.argv[5])):
        stats = model.measure(prompt, 8)
        if stats.neuron_cache_hit_rate == 1.0:
            break
    plan = model.plan
    if sys.argv[6:]:
        model.score(tokens=range(plan.max_context - 1))
        stats = model.measure(prompt, 8)
    figures = stats.peak_memory_bytes, plan.budget_bytes, plan.total_bytes, stats.neuron_cache_hit_rate
    print(json.dumps(figures))
"""
# Mapped files when the process was measured and after passes, and what is planned for what comes between.
MAPPED = """
import json, sys, mlx.core, ondevice
from ondevice.runtime import resolving
from ondevice.units import PROC, process_memory, read_kilobytes

def mapped():
    return read_kilobytes(PROC / "self" / "status", ("RssFile",))["RssFile"]

def measured():
    held.append((mapped(), process_memory()))
    return held[-1][1]

held, after = [], []
resolving.process_memory = measured
for sparsity in ("dense", "exact"):
    options = {"backend": "mlx", "sparsity": sparsity, "max_context": 512, "speculation": "off", "threads": 1}
    with ondevice.load(sys.argv[1], **options) as model:
        if not after:
            before, memory = held[-1]
            planned = model.plan.process_bytes - memory.current_bytes
        model.measure(20, 4)
        after.append(mapped())
print(json.dumps((mlx.core.__file__, before, max(after), planned)))
"""
TWO_MODELS = """
import json, sys, ondevice
path, second, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
options["threads"] = 1

def smallest():
    return ondevice.inspect(path, **options).minimum_budget_bytes

def fill(model):
    for _ in range(int(sys.argv[4])):
        stats = model.measure(options["max_context"] - 20, 6)
    return stats.peak_memory_bytes

# The later model is planned while the earlier one holds no neurons, keys and values yet.
with ondevice.load(path, dram_budget=smallest() + (24 << 20), **options) as one:
    budget = smallest() + (24 << 20) if second == "named" else "auto"
    with ondevice.load(path, dram_budget=budget, **options) as other:
        peak = max(fill(model) for model in (one, other, one))
        plan = other.plan
        print(json.dumps((peak, plan.budget_bytes, plan.total_bytes, one.plan.total_bytes)))
"""
MANY_THREADS = """
import json, random, sys, threading, time, ondevice
path, seconds = sys.argv[1], float(sys.argv[2])
options = {"threads": 1, "max_context": 512}
one = ondevice.inspect(path, **options)
budget = one.full_bytes + 2 * (one.full_bytes - one.process_bytes)
loaded, refused, end = [], [], time.monotonic() + seconds

def work(seed):
    random_numbers = random.Random(seed)
    while time.monotonic() < end:
        try:
            with ondevice.load(path, dram_budget=budget, **options) as model:
                loaded.append(model.plan.others_bytes)
                model.measure(random_numbers.randrange(10, 400), 6)
                model.set_dram_budget(random_numbers.choice((budget, budget // 2)))
                model.measure(random_numbers.randrange(10, 400), 6)
                peaks.append(model.stats.peak_memory_bytes)
        except ondevice.BudgetError:
            refused.append(seed)
            time.sleep(0.2)

peaks = []
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps((max(peaks), budget, len(loaded), len(refused), max(loaded))))
"""

HEAPS = """
import ctypes, json, re, sys, tempfile, ondevice
library = ctypes.CDLL(None)
library.fopen.restype = ctypes.c_void_p

def heaps():
    with tempfile.NamedTemporaryFile() as file:
        stream = ctypes.c_void_p(library.fopen(file.name.encode(), b"w"))
        library.malloc_info(0, stream)
        library.fclose(stream)
        said = file.read().decode()
    unused = re.findall(r'<total type="rest" count="\\d+" size="(\\d+)"/>', said)
    most = re.findall(r'<system type="max" size="(\\d+)"/>', said)
    return int(unused[-1]), int(most[-1])

before = heaps()[0]
options = json.loads(sys.argv[2])
budget = ondevice.inspect(sys.argv[1], **options).minimum_budget_bytes
with ondevice.load(sys.argv[1], dram_budget=budget, **options) as model:
    loaded = heaps()[0] - before
    model.measure(options["max_context"] - 20, 4)
    ended, most = heaps()
    print(json.dumps((loaded, ended - before, most)))
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """35 MB of weights that every token uses, 42 of feed-forward, 17 of embedding."""
    return make_bundle(tmp_path_factory.mktemp("footprint"))


@pytest.fixture(scope="module")
def relu_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a ReLU gate: half of the neurons fire."""
    return make_bundle(tmp_path_factory.mktemp("relu"), hidden_act="relu")


def make_bundle(folder: Path, **options: Any) -> Path:
    config = tiny_config(**(SHAPE | options))
    noise = np.random.default_rng(0).standard_normal(1 << 18, dtype=np.float32) / 32
    tensors = {
        name: np.ones(shape, np.float32) if name.endswith("norm.weight") else np.resize(noise, shape)
        for name, shape in tensor_shapes(config).items()
    }
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(config))
    save_safetensors(folder / "hf" / "model.safetensors", tensors, "F16")
    return convert_bundle(folder / "hf", folder / "bundle", "q8")


@pytest.fixture(scope="module")
def predicted_bundle(relu_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ReLU model with predictors of high rank, which select about half of the neurons at random."""
    folder = copytree(relu_bundle, tmp_path_factory.mktemp("predicted") / "bundle")
    hidden, neurons = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    random = np.random.default_rng(0)
    down = random.standard_normal((PREDICTOR_RANK, hidden), np.float32)
    up = random.standard_normal((neurons, PREDICTOR_RANK), np.float32)
    predictor = LayerPredictor(down, up, np.zeros(neurons, np.float32))
    inputs = random.standard_normal((64, hidden)).astype(np.float16)
    # Thresholds fall where scores of their own are above zero: half of all, and a little less at each recall.
    held = HeldBack(np.arange(0, 64, 2), np.arange(1, 64, 2), block=1)
    stored = store_predictor(predictor, inputs, predictor.scores(inputs) > 0, held, 8)
    write_predictors(Bundle.open(folder), [stored] * SHAPE["num_hidden_layers"], folder, 0, 32)
    return folder


@pytest.fixture(scope="module")
def shared_bundle(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with adapters of high rank in its last two layers, for every token."""
    folder = copytree(bundle, tmp_path_factory.mktemp("shared") / "bundle")
    ranks = {"attention_rank": ADAPTER_RANK, "feed_forward_rank": ADAPTER_RANK}
    add_streams(folder, layers=2, mode="shared", scale=0.01, **ranks)
    return folder


def run(
    bundle: Path, budget: str, prompt: int, rounds: int = 20, scores: bool = False, **options: int | str
) -> tuple[int, int, int, float]:
    """(peak, budget, planned total, hit rate) of a process of its own, which ends when all is in memory.

    scores: whether it also scores a text of one context, which takes the logits of several tokens.
    """
    arguments = [str(bundle), budget, str(prompt), json.dumps(options), str(rounds), *["scores"] * scores]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    peak, allowed, total, hit_rate = json.loads(done.stdout)
    return peak, allowed, total, hit_rate


def heaps(bundle: Path, **options: int | str) -> tuple[int, int, int]:
    """What the C library's heaps hold and nothing uses, after loading and after a prompt, more than before;
    and the most that they ever held."""
    if not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "malloc_info"):
        pytest.skip("asks glibc")
    done = subprocess.run(
        [sys.executable, "-c", HEAPS, str(bundle), json.dumps(options)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    loaded, ended, most = json.loads(done.stdout)
    return loaded, ended, most


@pytest.mark.slow
def test_no_heap_keeps_what_loading_and_wide_passes_held(bundle: Path) -> None:
    """Every thread has a heap: of pieces of 4 MiB and of a pass's arrays, nothing may stay in one."""
    loaded, ended, _ = heaps(bundle, max_context=1024, speculation="off")
    assert loaded < 3 << 20
    assert ended < 4 << 20


@pytest.mark.slow
def test_no_heap_keeps_what_mlx_computed_with(bundle: Path) -> None:
    pytest.importorskip("mlx.core", exc_type=ImportError)
    *_, most = heaps(bundle, max_context=300, speculation="off", backend="mlx")
    assert most < 24 << 20


@pytest.mark.slow
def test_loading_keeps_to_the_smallest_budget(bundle: Path) -> None:
    peak, allowed, total, _ = run(bundle, "smallest", 4, scores=True, max_context=64)
    assert 0.85 * total <= peak <= allowed


UNGATED = {"intermediate_size": None, "initializer_range": None, "num_key_value_heads": None, "ffn_dim": 4096}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("Glm4", {"head_dim": 64}, id="norms of outputs"),
        pytest.param("StableLm", {"use_parallel_residual": True}, id="parallel"),
        pytest.param(
            "Gemma3nText",
            {
                "head_dim": 64,
                "hidden_size_per_layer_input": 64,
                "vocab_size_per_layer_input": 16384,
                "num_hidden_layers": 4,
                "num_kv_shared_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
            },
            id="copies of the residual",
        ),
        pytest.param(
            "Gemma4Text",
            {
                "head_dim": 64,
                "global_head_dim": 128,
                "hidden_size_per_layer_input": 64,
                "vocab_size_per_layer_input": 16384,
                "num_hidden_layers": 4,
                "num_kv_shared_layers": 2,
                "use_double_wide_mlp": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            id="heads of two sizes",
        ),
        pytest.param("OPT", UNGATED, id="ungated"),
        pytest.param(
            "OPT",
            {**UNGATED, "do_layer_norm_before": False, "word_embed_proj_dim": 1024},
            id="norms of the residual, wide embeddings",
        ),
    ],
)
def test_blocks_of_other_families_keep_to_the_plan(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    """What a block holds beside a Llama's: rows before their output norm, and the input of both blocks."""
    pytest.importorskip("transformers")
    from tests.support.families import write_model

    sizes = SHAPE | {"num_hidden_layers": 3, "num_key_value_heads": 4, "head_dim": None}
    write_model(tmp_path / "source", family, sizes | options)
    wide = convert_bundle(tmp_path / "source", tmp_path / "bundle", "q8")
    peak, _, total, hit_rate = run(wide, "8GB", 1000, max_context=1024, prefill_chunk=1024)
    assert hit_rate == 1.0
    assert 0.80 * total <= peak <= total


@pytest.mark.slow
@pytest.mark.parametrize("attends", [True, False], ids=["beside attention", "alone"])
def test_mixers_keep_to_the_plan(tmp_path: Path, attends: bool) -> None:
    """Mamba-2 mixers, of which those beside attention hold two outputs at once.

    Passes end at checkpoints, 832 tokens apart beside attention, so no chunk may be wider than that. The
    prompt is one pass with a checkpoint inside, around which outputs are copied and joined.
    """
    sizes = {"hidden_size": 1024, "num_heads": 16, "num_kv_heads": 4, "head_dim": 64, "vocab_size": 16384}
    config = golden_config(**sizes, intermediate_size=2048, max_context=1024, hidden_act="silu")
    plain, mixer = config.layers[0], Mamba2Spec(32, 64, 1, 128, conv_bias=True)
    layer = replace(plain, attention=plain.attention if attends else NO_ATTENTION, mamba2=mixer)
    bare = replace(layer, feed_forward=replace(layer.feed_forward, neurons=0))
    layers = (layer, bare, layer, plain)
    wide = write_small(tmp_path / "bundle", replace(config, layers=layers), QuantConfig(8))
    peak, _, total, hit_rate = run(wide, "8GB", 768, max_context=1024, prefill_chunk=768)
    assert hit_rate == 1.0
    assert 0.80 * total <= peak <= total


@pytest.mark.slow
def test_long_prompts_keep_to_small_budgets_every_time(tmp_path: Path) -> None:
    """340 MB of weights of 8 bits, twenty times: what threads' heaps keep differs from run to run."""
    wide, above = make_bundle(tmp_path, **QWEN3), []
    prompts = np.random.default_rng(22).integers(1200, 3123, 20).tolist()
    for number, prompt in enumerate(prompts):
        options = {"max_context": 4096, "kv_bits": (8, 16)[number % 2], "speculation": "off"}
        peak, allowed, total, _ = run(
            wide, ("smallest", "1.1smallest")[number // 2 % 2], prompt, 1, **options
        )
        assert total <= allowed
        above.append((peak - allowed) / 1e6)
    assert max(above) <= 0, above


@pytest.mark.slow
def test_narrow_values_keep_to_the_plan(tmp_path: Path) -> None:
    """Keys and values of a long context, and what attention gives, times a factor."""
    sizes = {"hidden_size": 1024, "num_heads": 16, "num_kv_heads": 8, "head_dim": 96, "vocab_size": 16384}
    config = golden_config(**sizes, intermediate_size=2048, max_context=1024, hidden_act="silu")
    attention = replace(config.layers[0].attention, value_dim=64, out_factor=0.75, sinks=True)
    layers = tuple(replace(layer, attention=attention) for layer in config.layers)
    narrow = write_small(tmp_path / "bundle", replace(config, layers=layers), QuantConfig(8))
    peak, _, total, hit_rate = run(narrow, "8GB", 1000, max_context=1024, prefill_chunk=1024)
    assert hit_rate == 1.0
    assert 0.78 * total <= peak <= total


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "least"), [(64, 0.90), (1024, 0.83)])
def test_a_pass_takes_what_is_planned_for_it(bundle: Path, chunk: int, least: float) -> None:
    """A wide chunk's scratch memory is a third of all, and planned a little generously."""
    peak, _, total, hit_rate = run(bundle, "8GB", 1000, max_context=1024, prefill_chunk=chunk)
    assert hit_rate == 1.0
    assert least * total <= peak <= total


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "least"), [(64, 0.90), (1024, 0.83)])
def test_a_pass_with_adapters_takes_what_is_planned_for_it(
    shared_bundle: Path, chunk: int, least: float
) -> None:
    """What lies between their matrices and what they add, of every token of a chunk, without any draft."""
    options = {"max_context": 1024, "prefill_chunk": chunk, "speculation": "off"}
    peak, _, total, hit_rate = run(shared_bundle, "8GB", 1000, **options)
    assert hit_rate == 1.0
    assert least * total <= peak <= total


@pytest.mark.fast("smallest-600-1")
@pytest.mark.parametrize(
    ("budget", "prompt", "rounds"), [("smallest", 4, 20), ("smallest", 600, 1), ("8GB", 1000, 20), LONG[0]]
)
def test_neurons_that_fire_keep_to_the_plan(relu_bundle: Path, budget: str, prompt: int, rounds: int) -> None:
    options = {"max_context": 1024, "sparsity": "exact"}
    peak, allowed, total, _ = run(relu_bundle, budget, prompt, rounds, **options)
    assert 0.80 * total <= peak <= total <= allowed


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "prompt", "rounds"), [("smallest", 4, 20), *LONG])
def test_neurons_that_are_predicted_keep_to_the_plan(
    predicted_bundle: Path, budget: str, prompt: int, rounds: int
) -> None:
    options = {"max_context": 1024, "sparsity": "predicted"}
    peak, allowed, total, _ = run(predicted_bundle, budget, prompt, rounds, **options)
    assert 0.80 * total <= peak <= total <= allowed


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", ["dense", "exact"])
def test_mlx_keeps_to_the_smallest_budget(relu_bundle: Path, sparsity: str) -> None:
    """Its scratch memory is planned for the widest chunk, and freed arrays that it may keep."""
    pytest.importorskip("mlx.core", exc_type=ImportError)
    options = {"backend": "mlx", "speculation": "off", "sparsity": sparsity, "max_context": 64}
    peak, allowed, total, _ = run(relu_bundle, "smallest", 40, rounds=2, **options)
    assert 0.75 * total <= peak <= total <= allowed


@pytest.mark.slow
def test_a_freshly_installed_mlx_keeps_to_the_smallest_budget(relu_bundle: Path, tmp_path: Path) -> None:
    """Code that was written just now lies in large folios of the page cache: more of it is mapped at once."""
    core = pytest.importorskip("mlx.core", exc_type=ImportError)
    packages, folder = Path(core.__file__).parents[1], tmp_path / "packages"
    for source in (packages / "mlx", *packages.glob("mlx*.libs")):
        for path in source.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                copy = folder / path.relative_to(packages)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", MAPPED, str(relu_bundle)],
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    where, before, after, planned = json.loads(done.stdout)
    assert Path(where).is_relative_to(folder)
    assert before < after <= before + planned


MLX = {"max_context": 64, "backend": "mlx", "speculation": "off"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("second", "rounds", "options"),
    [
        pytest.param("named", 3, {"max_context": 512}, id="cpu"),
        pytest.param("auto", 3, {"max_context": 512}, id="auto"),
        pytest.param("named", 1, MLX, id="mlx"),
    ],
)
def test_two_models_together_keep_to_the_larger_budget(
    bundle: Path, second: str, rounds: int, options: dict[str, int | str]
) -> None:
    libraries = 0
    if options.get("backend") == "mlx":
        pytest.importorskip("mlx.core", exc_type=ImportError)
        # Planned, and hardly used unless MLX was installed just now.
        libraries = MLX_LIBRARY_BYTES
    done = subprocess.run(
        [sys.executable, "-c", TWO_MODELS, str(bundle), second, json.dumps(options), str(rounds)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    peak, budget, total, first_total = json.loads(done.stdout)
    assert first_total < total <= budget
    assert 0.75 * (total - libraries) <= peak <= budget


@pytest.mark.slow
def test_threads_that_load_and_close_models_keep_to_one_budget(bundle: Path) -> None:
    """Three models fit, and five threads want one each."""
    done = subprocess.run(
        [sys.executable, "-c", MANY_THREADS, str(bundle), "30"], stdout=subprocess.PIPE, text=True, check=True
    )
    peak, budget, loaded, refused, beside = json.loads(done.stdout)
    assert peak <= budget
    assert min(loaded, refused, beside) > 0
