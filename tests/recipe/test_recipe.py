"""The recipe of the model that ships, on made-up text and a tiny model: seconds, offline."""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.converters.quantize import dequantize, quantize
from ondevice.kernels import _native
from ondevice.tokenizer import load_tokenizer
from tests.support.bundles import convert_bundle
from tests.support.engines import all_logits, running

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from recipe import (  # noqa: E402
    data,
    evaluate,
    export,
    model,
    pack,
    samples,
    sparsity,
    sql,
    tokenizer,
    train,
)
from recipe.config import MIXTURE, SIZES, Training  # noqa: E402

TINY = Training(
    shape=SIZES["tiny"],
    tokens=8 * 4 * 64,
    batch_windows=4,
    micro_windows=2,
    learning_rate=0.01,
    warmup_steps=2,
)
WORDS = "a table in the old town is booked for you and they said so at 11:30 pm every day of 1842"
PROSE = "It was a long day in the town, and they all went home at once when it was over."
CHAT = (("user", "Find a table for 2\nin San Jose!"), ("assistant", "It is booked."), ("user", "Thanks"))


def made_up(domain: str) -> list[data.Document]:
    rng = random.Random(domain)

    def text(count: int) -> str:
        return " ".join(rng.choices(WORDS.split(), k=count))

    if domain == "novels":
        return [(("", text(80) + "\n" + text(30)),) for _ in range(12)]
    return [(("user", text(9)), ("assistant", text(12)), ("user", text(5))) for _ in range(40)]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build folder with a tokenizer, and streams of every domain."""
    folder = tmp_path_factory.mktemp("recipe")
    documents = {domain: made_up(domain) for domain in MIXTURE}
    lines = [line for found in documents.values() for doc in found for _, t in doc for line in t.split("\n")]
    alphabet = "".join(map(chr, range(33, 127)))
    model = tokenizer.train([*lines, alphabet], vocab_size=SIZES["tiny"].vocab_size)
    (folder / "tokenizer.model").write_bytes(model)
    for domain, found in documents.items():
        for split in ("train", "held_out"):
            pack.pack(found, tokenizer.Encoder(model)).tofile(folder / f"{domain}.{split}.bin")
    return folder


@pytest.fixture(scope="module")
def trained(build: Path) -> tuple[train.Run, list[float]]:
    """A finished run and the losses on its way; its checkpoint and its Hugging Face folder are in `build`."""
    torch.set_num_threads(1)
    run = train.start(TINY, build)
    losses = [run.update()["loss"] for _ in range(TINY.steps)]
    folder = build / "runs" / "tiny"
    folder.mkdir(parents=True)
    train.save_checkpoint(run, folder)
    export.export(run.model, (build / "tokenizer.model").read_bytes(), build / "export" / "tiny")
    return run, losses


def test_a_resumed_run_repeats_the_losses_of_one_that_never_stopped(
    build: Path, trained: tuple[train.Run, list[float]], tmp_path: Path
) -> None:
    first = train.start(TINY, build)
    losses = [first.update()["loss"] for _ in range(3)]
    train.save_checkpoint(first, tmp_path)
    second = train.resume(train.load_checkpoint(tmp_path), build)
    assert second.training == TINY
    losses += [second.update()["loss"] for _ in range(TINY.steps - 3)]
    assert losses == trained[1]
    assert losses[-1] < losses[0] - 0.1


def test_attention_and_its_gradients_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = 2 * model.QUERY_BLOCK + 37
    q, k, v, into = (torch.randn(2, 3, tokens, 16, generator=generator) for _ in range(4))
    found, wanted = [], []
    for attend, gradients in (
        (model.CausalAttention.apply, found),
        (partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, scale=1.0), wanted),
    ):
        inputs = [x.clone().requires_grad_() for x in (q / 4, k, v)]
        out = attend(*inputs)
        out.backward(into)
        gradients += [out.detach(), *(x.grad for x in inputs)]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_rounded_as_a_bundle_rounds_them(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 128, generator=generator)
    weight[0, :64] = 0
    weight[1, :64] = weight[1, :64].abs()
    runner = _native.Runner(1, "auto")
    exact = torch.from_numpy(dequantize(quantize(runner, weight.numpy(), bits, "w"), bits, 128))
    torch.testing.assert_close(model.stored(weight, bits), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.stored(weight.t(), bits, dim=0), exact.t(), rtol=1e-5, atol=1e-6)
    assert model.stored(weight, 0) is weight
    weight.requires_grad_()
    (model.stored(weight, bits) * exact).sum().backward()
    torch.testing.assert_close(weight.grad, exact)


def test_a_run_stops_for_time_and_its_log_forgets_what_wasnt_saved(build: Path, tmp_path: Path) -> None:
    run = train.start(TINY, build)
    assert list(train.train(run, build, tmp_path, minutes=0.0)) == []
    lines = list(train.train(run, build, tmp_path, minutes=1.0))
    assert [line["step"] for line in lines] == [TINY.steps, TINY.steps]
    assert set(lines[-1]["held_out"]) == set(MIXTURE)
    assert train.load_checkpoint(tmp_path)["step"] == TINY.steps
    with (tmp_path / train.LOG).open("a") as log:
        log.write('{"step": 1')
    train.forget_after(tmp_path, TINY.steps - 1)
    assert (tmp_path / train.LOG).read_text() == ""


def test_a_run_that_isnt_at_its_end_is_exported_only_if_that_is_said(build: Path, tmp_path: Path) -> None:
    run = train.start(TINY, build)
    train.save_checkpoint(run, tmp_path)
    with pytest.raises(ValueError, match=f"at step 0 of {TINY.steps}: go on with training"):
        export.model_of_checkpoint(tmp_path)
    assert export.model_of_checkpoint(tmp_path, unfinished=True).shape == TINY.shape


def test_a_run_goes_on_with_its_own_settings_or_not_at_all(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    train.save_checkpoint(train.start(TINY, build), folder)
    options = ["train", "--build", str(tmp_path), "--name", "tiny", "--minutes", "0", "--no-compile"]
    for stream in build.glob("*.bin"):
        (tmp_path / stream.name).symlink_to(stream)
    monkeypatch.setattr(sys, "argv", [*options, "--tokens", "999999"])
    with pytest.raises(SystemExit) as refused:
        train.main()
    assert refused.value.code == 2
    monkeypatch.setattr(sys, "argv", [*options, "--size", "tiny", "--seed", str(TINY.seed)])
    train.main()
    assert train.load_checkpoint(folder)["step"] == 0


def test_the_exported_model_is_the_trained_one_everywhere(
    build: Path, trained: tuple[train.Run, list[float]]
) -> None:
    """f16 rounds weights to 2^-11 of themselves, which is what the limits leave room for."""
    ids = pack.held_out_windows(build, "dialogue", 64, 1)
    with torch.no_grad():
        ours = trained[0].model.logits_and_gates(torch.from_numpy(ids))[0][0].numpy()
        theirs = transformers_logits(build / "export" / "tiny", ids).numpy()
    bundle = convert_bundle(build / "export" / "tiny", build / "bundles" / "reference", "f16")
    with running(bundle) as model:
        runtime = all_logits(model, ids[0].tolist(), 32)
    scale = np.abs(ours).max()
    assert np.abs(ours - theirs).max() < 1e-5 * scale
    assert np.abs(ours - runtime).max() < 3e-3 * scale


def transformers_logits(folder: Path, ids: np.ndarray) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.from_numpy(ids)).logits[0]


@pytest.mark.fast("q4")
@pytest.mark.parametrize("quant", ["f16", "q8", "q4"])
def test_a_bundles_weights_come_back_as_a_model(
    build: Path, trained: tuple[train.Run, list[float]], quant: str
) -> None:
    bundle = convert_bundle(build / "export" / "tiny", build / "bundles" / f"back-{quant}", quant)
    model = export.model_of_bundle(bundle)
    assert model.shape == TINY.shape
    limit = {"f16": 1e-3, "q8": 0.02, "q4": 0.2}[quant]
    for name, value in trained[0].model.state_dict().items():
        assert (model.state_dict()[name] - value).norm() <= limit * value.norm(), name


def test_the_chat_template_gives_the_tokens_of_training(
    build: Path, trained: tuple[train.Run, list[float]]
) -> None:
    encoder = tokenizer.Encoder((build / "tokenizer.model").read_bytes())
    messages = [{"role": role, "content": text} for role, text in CHAT]
    reply = encoder.encode((*CHAT, ("assistant", "x")))
    bundle = convert_bundle(build / "export" / "tiny", build / "bundles" / "chat", "q8")
    with ondevice.load(bundle) as model:
        ids = model.chat_ids(messages)
        names = model.tokenizer.special_tokens
        assert set(model.tokenizer.eos_ids) == {names["<|end|>"], encoder.bos_id}
        with_system = model.chat_ids([{"role": "system", "content": "Be brief."}, *messages])
    assert ids == reply[: len(ids)]
    assert ids[-1] == names["<|assistant|>"]
    text = (("user", f"Be brief.\n{CHAT[0][1]}"), *CHAT[1:])
    assert with_system[:-1] == encoder.encode(text)


def test_byte_counts_add_up_to_the_text(build: Path) -> None:
    encoder = tokenizer.Encoder((build / "tokenizer.model").read_bytes())
    text = "a table, naïve 11:30\nin the town"
    document = (("user", text), ("assistant", "\n" + text))
    expected = sum(len(said.encode()) for _, said in document)
    stream = np.array(encoder.encode(document), dtype=np.uint16)
    assert encoder.text_bytes(stream) == expected
    half = len(stream) // 2
    windows = np.stack([stream[:half], stream[half - 1 : 2 * half - 1]])
    rest = encoder.text_bytes(stream[2 * half - 2 :])
    assert encoder.text_bytes(windows) + rest == expected


@pytest.mark.slow
def test_figures_are_taken_alike_from_every_framework(
    build: Path, trained: tuple[train.Run, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = evaluate.evaluate(build, "tiny", limit=2)
    worst = evaluate.differences(found)
    assert worst["transformers"] < 1e-4
    assert worst["f16"] < 0.005
    assert 0 < worst["q8"] < worst["q4"]
    assert evaluate.table(found).count("\n") == 1 + len(MIXTURE)
    monkeypatch.setattr(evaluate, "MODEL_FOLDER", build / "bundles" / "tiny-q8")
    shipped = evaluate.evaluate(build, None, limit=2)
    assert shipped["shipped"] == found["q8"]
    assert 0 < evaluate.differences(shipped)["shipped"] < 0.005


def test_sparsity_counts_what_is_active(build: Path, trained: tuple[train.Run, list[float]]) -> None:
    found = sparsity.measure(trained[0].model, build, limit=2)
    for values in found.values():
        for zeros, distinct in zip(values["zeros"], values["distinct"], strict=True):
            assert distinct[0] == pytest.approx(1 - zeros)
            assert sorted(distinct) == distinct
    active = torch.tensor([[[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1]]]).bool()
    assert sparsity.distinct_share(active, 2) == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert sparsity.also_before(active) == pytest.approx(1 / 3)
    assert "| mean |" in sparsity.report(found)


def test_batches_keep_to_the_mixture_and_go_on_where_they_stopped() -> None:
    streams = {name: np.arange(size, dtype=np.uint16) for name, size in (("a", 500), ("b", 300))}
    shares = {"a": 0.75, "b": 0.25}
    whole = pack.Batches(streams, shares, 16, seed=4)
    drawn = whole.draw(80)
    assert whole.drawn == {"a": 60, "b": 20}
    assert (np.diff(drawn, axis=1) == 1).all()
    begun = pack.Batches(streams, shares, 16, seed=4)
    first = begun.draw(33)
    rest = pack.Batches(streams, shares, 16, seed=4, drawn=begun.drawn).draw(47)
    assert (np.concatenate([first, rest]) == drawn).all()
    assert (pack.Batches(streams, shares, 16, seed=5).draw(80) != drawn).any()
    starts = drawn[:, 0]
    assert len(set(starts[:30].tolist())) > 25


def test_sql_is_written_for_sqlite() -> None:
    where = 'WHERE ORDER_FIELD = "var0" AND X_FIELD > var1'
    query = sql._parse(f"SELECT COUNT TABLEalias0.1ST_LEG_FIELD FROM TABLE AS TABLEalias0 {where} ;")
    assert query is not None
    text = sql._filled(query, "How many by O'Neil over 3?", {"var0": "o'neil", "var1": "3"})
    assert text == "SELECT COUNT(n_1st_leg) FROM records WHERE order_ = 'O''Neil' AND x > 3"
    columns = ("n_1st_leg", "order_", "x")
    assert sql.compiles(text, columns)
    assert not sql.compiles(text, ("x",))
    assert sql.parses(text)
    assert sql.compiles("SELECT x FROM records WHERE x = 'a \"b\"'", columns)
    assert not sql.compiles('SELECT "nowhere" FROM records', columns)
    for no_query in ("SELECT FROM records", "DROP TABLE records", "PRAGMA foo", "SELECT 'a FROM records"):
        assert not sql.parses(no_query)
    assert sql._parse("SELECT A_FIELD FROM B ;") is None


def test_wrapped_lines_become_paragraphs_and_headings_go() -> None:
    lines = ["CHAPTER I", "[Illustration: a dog]"]
    for _ in range(40):
        lines += [PROSE[:43], PROSE[44:]]
    assert data.paragraphs("\n".join(lines)) == [PROSE] * 40
    assert data.clean("\ufeff\u201cNo\u201d\u2014it\u2019s\u2026\r\n a\tb") == '"No"--it\'s...\na b'


def test_held_out_documents_are_never_trained_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def read(folder: Path) -> Any:
        asked = ("user", "same question")
        yield True, (asked, ("assistant", "one"))
        yield False, (asked, ("assistant", "two"))
        yield False, (("user", "other"), ("assistant", "three"))
        yield False, (("user", "other"), ("assistant", "three"))

    monkeypatch.setitem(data.READERS, "sql", read)
    kept, held = data.split_documents(tmp_path, "sql")
    assert kept == [(("user", "other"), ("assistant", "three"))]
    assert len(held) == 1


def test_samples_count_what_parses(
    build: Path, trained: tuple[train.Run, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "REPLY_TOKENS", 4)
    monkeypatch.setattr(samples, "STORY_TOKENS", 4)
    bundle = convert_bundle(build / "export" / "tiny", build / "bundles" / "samples", "q8")
    example = sql.Example("test", "How many?", ("a",), "SELECT a FROM records")
    with ondevice.load(bundle) as model:
        result = samples.judge_sql(model, [example])
        written = [
            *samples.dialogues(model, [CHAT]),
            *samples.stories(model, [(("", "in the old town " * 12),)]),
        ]
    assert result["questions"] == 1
    assert len(result["unparsed"]) == 1 - result["parse_share"]
    assert written[0].count("**Model:**") == 2
    assert "in the old town in **|**" in written[1]


@pytest.mark.slow
def test_real_text_becomes_documents(shared_data: Path) -> None:
    for domain, least in (("dialogue", 13000), ("restaurants", 4000), ("math", 7000)):
        kept, held = data.split_documents(shared_data, domain)
        assert len(kept) > least
        assert held
        assert not {doc[0] for doc in kept} & {doc[0] for doc in held}
        assert all(role in tokenizer.ROLES and text for doc in kept for role, text in doc)


def test_the_tokenizer_file_loads_as_the_runtime_loads_it(build: Path) -> None:
    blob = (build / "tokenizer.model").read_bytes()
    loaded = load_tokenizer("sentencepiece", blob, 1, (2,), True, vocab_size=SIZES["tiny"].vocab_size)
    encoder = tokenizer.Encoder(blob)
    text = "They said: 11:30 pm.\n\n  naïve — 東京"
    assert loaded.encode(text) == encoder.encode((("", text),))
    assert loaded.decode(loaded.encode(text)[1:]) == text
