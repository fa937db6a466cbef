"""What a bundle says of its tokenizer: kind, special tokens, chat template, and whether it is the model's."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from ondevice.bundle.layout import TOKENIZER_FILES
from ondevice.bundle.manifest import TokenizerInfo, TokenizerKind
from ondevice.bundle.reader import Bundle
from ondevice.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate
from ondevice.converters.checkpoints import sentencepiece_model as proto
from ondevice.converters.checkpoints.piece_table import piece_table
from ondevice.converters.convert import convert
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.runtime.opening import open_tokenizer
from ondevice.tokenizer import MAX_TOKENIZER_BYTES, load_tokenizer
from tests.support.models import write_checkpoint
from tests.support.refusals import assert_refused

VOCAB = 300


def byte_level(bos: str | None = None, extra: int = 0) -> Tokenizer:
    """256 byte tokens, then `<bos>`, `<eot>`, `<eos>` and `extra` more; `bos` goes before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eot>", "<eos>", *(f"<extra{i}>" for i in range(extra))])
    if bos:
        pair = (bos, tokenizer.token_to_id(bos))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[pair])
    return tokenizer


BOS, EOT, EOS = 256, 257, 258


def sentencepiece_model(extra: int = 0, **options: bool) -> bytes:
    pieces = [("<unk>", 0.0, proto.UNKNOWN), ("<s>", 0.0, proto.CONTROL), ("</s>", 0.0, proto.CONTROL)]
    pieces += [(f"<0x{byte:02X}>", 0.0, proto.BYTE) for byte in range(256)]
    pieces += [(f"x{i}", -float(i), proto.NORMAL) for i in range(extra)]
    return proto.bpe_model(pieces, 0, 1, 2, **options)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model of 300 tokens; its config says 1 and 2 for the ends of a text."""
    return write_checkpoint(tmp_path / "source", vocab_size=VOCAB, num_hidden_layers=1)


def write_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(values))


def converted(source: Path) -> tuple[TokenizerInfo, Bundle]:
    bundle = Bundle.open(convert(source, source.parent / "bundle"))
    return bundle.manifest.tokenizer, bundle


def test_no_tokenizer_is_a_warning(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        info, bundle = converted(source)
    assert "neither tokenizer.json nor tokenizer.model" in caplog.text
    assert info == TokenizerInfo(None, bos_id=1, eos_ids=(2,), add_bos=False)
    assert not (bundle.path / "tokenizer.json").exists()


@pytest.mark.parametrize("prefix", [True, False])
def test_a_file_is_carried_over_as_it_is_unless_a_table_does_the_same(source: Path, prefix: bool) -> None:
    library = byte_level()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    library.save(str(source / "tokenizer.json"))
    (source / "tokenizer.model").write_bytes(sentencepiece_model())
    info, bundle = converted(source)
    assert info.kind == ("tokenizers" if prefix else "byte_pairs")
    files = {path.name for path in bundle.path.glob("tokenizer.*")}
    assert files == {"tokenizer.json" if prefix else "tokenizer.bin"}
    if prefix:
        assert bundle.read_small("tokenizer.json") == (source / "tokenizer.json").read_bytes()
    tokenizer = open_tokenizer(bundle)
    assert tokenizer is not None
    assert tokenizer.encode("abc <eos>", add_bos=False, special=True) == library.encode("abc <eos>").ids


@pytest.mark.parametrize("strips", [True, False])
def test_a_sentencepiece_model_alone_is_converted(source: Path, strips: bool) -> None:
    data = sentencepiece_model(strips_spaces=strips)
    (source / "tokenizer.model").write_bytes(data)
    info, bundle = converted(source)
    kind: TokenizerKind = "sentencepiece" if strips else "byte_pairs"
    assert info == TokenizerInfo(kind, bos_id=1, eos_ids=(2,), add_bos=True)
    assert bundle.read_small(TOKENIZER_FILES[kind]) == (data if strips else piece_table(data))


def test_tokens_added_to_a_sentencepiece_model_are_its_last_pieces(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (source / "tokenizer.model").write_bytes(sentencepiece_model())
    write_json(source / "added_tokens.json", **{"<|im_end|>": 260, "<pad>": 259, "one word": 262})
    decoder = {
        "1": {"content": "<s>", "special": True},
        "260": {"content": "<|im_end|>", "special": True},
        "261": {"content": "<|im_start|>", "special": True},
    }
    settings = {"eos_token": "<|im_end|>", "pad_token": {"content": "<pad>"}, "added_tokens_decoder": decoder}
    write_json(source / "tokenizer_config.json", **settings)
    with caplog.at_level(logging.WARNING):
        info, bundle = converted(source)
    assert "left out" not in caplog.text
    assert info.eos_ids == (2, 260)
    table = bundle.read_small("tokenizer.bin")
    tokenizer = load_tokenizer("byte_pairs", table, 1, info.eos_ids, True, vocab_size=VOCAB)
    assert tokenizer.special_tokens == {
        "<s>": 1, "</s>": 2, "<pad>": 259, "<|im_end|>": 260, "<|im_start|>": 261,
    }  # fmt: skip
    assert tokenizer.encode("<|im_start|>", special=True)[-1] == 261
    assert 261 not in tokenizer.encode("<|im_start|>")
    assert tokenizer.encode("one word")[-1] == 262
    assert tokenizer.decode([259, 262, 260]) == "one word"


def test_added_tokens_that_are_text_decode_alike_by_both_routes(source: Path) -> None:
    names = ["<tool_call>", "[INST]", "plain"]
    (source / "tokenizer.model").write_bytes(sentencepiece_model())
    decoder = {str(259 + i): {"content": name, "special": False} for i, name in enumerate(names)}
    write_json(source / "tokenizer_config.json", added_tokens_decoder=decoder)
    table = converted(source)[1].read_small("tokenizer.bin")
    whole = byte_level()
    whole.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    routes = (
        load_tokenizer("byte_pairs", table, 1, (2,), False),
        load_tokenizer("tokenizers", whole.to_str().encode(), BOS, (EOS,), False),
    )
    for tokenizer in routes:
        assert [tokenizer.decode([259 + i]) for i in range(3)] == names
        assert [tokenizer.encode(name)[-1] for name in names] == [259, 260, 261]
        assert not set(names) & set(tokenizer.special_tokens)


def test_added_tokens_without_a_place_are_named(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    (source / "tokenizer.model").write_bytes(sentencepiece_model())
    added = {"<kept>": 259, "<gap>": 261, "<s>": 260, "<far>": VOCAB, "\ud800": 262, "": 263, "<other>": 5}
    added["<before>"] = -(1 << 63)
    write_json(source / "added_tokens.json", **added, wrong="7", worse=[1])
    decoder = {"x": 3, "264": {"content": 7}, "265": {"content": [], "special": True}}
    write_json(source / "tokenizer_config.json", added_tokens_decoder=decoder, pad_token=[[]])
    with caplog.at_level(logging.WARNING):
        _, bundle = converted(source)
    warning = next(record.getMessage() for record in caplog.records if "left out" in record.getMessage())
    for name in ("<gap>", "<s>", "<far>", "ud800", "'' (263)", "<other>", "<before>"):
        assert name in warning
    assert "<kept>" not in warning
    kept = proto.piece_fields([("<kept>", -1.0, proto.USER_DEFINED)])
    assert bundle.read_small("tokenizer.bin") == piece_table(sentencepiece_model() + kept)


@pytest.mark.parametrize(("processor", "settings", "bos_id", "add_bos"), [
    (None, {}, 1, False),
    ("<bos>", {"bos_token": "<bos>"}, BOS, True),
    ("<bos>", {"bos_token": {"content": "<bos>", "lstrip": False}}, BOS, True),
    ("<bos>", {"bos_token": "<bos>", "add_bos_token": False}, BOS, False),
    (None, {"bos_token": "<bos>", "add_bos_token": True}, BOS, True),
    (None, {"bos_token": None, "add_bos_token": True}, None, False),
    (None, {"bos_token": "<nowhere>", "add_bos_token": True}, None, False),
    (None, {"add_bos_token": "yes"}, 1, False),
])  # fmt: skip
def test_what_begins_a_text(
    source: Path, processor: str | None, settings: dict[str, Any], bos_id: int | None, add_bos: bool
) -> None:
    byte_level(processor).save(str(source / "tokenizer.json"))
    write_json(source / "tokenizer_config.json", **settings)
    info, _ = converted(source)
    assert (info.bos_id, info.add_bos) == (bos_id, add_bos)


@pytest.mark.parametrize(("generation", "settings", "eos_ids"), [
    ({}, {}, (2,)),
    ({"eos_token_id": EOS}, {}, (EOS,)),
    ({"eos_token_id": [EOS, EOT]}, {}, (EOS, EOT)),
    ({"eos_token_id": [EOS]}, {"eos_token": "<eot>"}, (EOS, EOT)),
    ({"eos_token_id": EOS}, {"eos_token": {"content": "<eos>"}}, (EOS,)),
    ({"eos_token_id": None}, {"eos_token": "<nowhere>"}, (2,)),
])  # fmt: skip
def test_what_ends_a_text(
    source: Path, generation: dict[str, Any], settings: dict[str, Any], eos_ids: tuple[int, ...]
) -> None:
    byte_level().save(str(source / "tokenizer.json"))
    write_json(source / "generation_config.json", **generation)
    write_json(source / "tokenizer_config.json", **settings)
    info, _ = converted(source)
    assert info.eos_ids == eos_ids


@pytest.mark.fast("True-<|im_end|>", "False-<|im_end|>", "True-</s>")
@pytest.mark.parametrize("name", ["<|im_end|>", "<end_of_turn>", "[EOT]", "</s>"])
@pytest.mark.parametrize("special", [True, False])
def test_a_token_by_which_the_template_ends_a_turn_ends_a_text(
    source: Path, name: str, special: bool
) -> None:
    """Configs often name the text's end alone. Without the template the token may be anything."""
    tokenizer = byte_level()
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([name])
    tokenizer.save(str(source / "tokenizer.json"))
    write_json(source / "generation_config.json", eos_token_id=EOS)
    for template, ends in (("{{ messages }}", (EOS,)), ("{{ messages[0].content }}" + name, (EOS, 259))):
        write_json(source / "tokenizer_config.json", chat_template=template)
        info, bundle = converted(source)
        assert info.eos_ids == ends
        shutil.rmtree(bundle.path)


def test_messages_of_channels_end_no_turn_in_a_folder(source: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|end|>", "<|return|>", "<|call|>"])
    tokenizer.save(str(source / "tokenizer.json"))
    write_json(source / "tokenizer_config.json", chat_template="x<|end|><|call|><|return|>")
    assert set(converted(source)[0].eos_ids) == {2, 260, 261}


@pytest.mark.parametrize("ids", [VOCAB, -1, [2, VOCAB], "2", [None], 2.0, True, {"a": 1}, [2] * 100])
def test_ends_outside_the_vocabulary(source: Path, ids: object) -> None:
    write_json(source / "generation_config.json", eos_token_id=ids)
    assert_refused(
        source, CheckpointError, r"generation_config\.json: eos_token_id .* must be ids below vocab_size 300"
    )


@pytest.mark.parametrize(("settings", "template"), [
    ({"chat_template": "{{ messages }}"}, "{{ messages }}"),
    ({"chat_template": [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]}, "D"),
    ({"chat_template": [{"name": "tools", "template": "T"}]}, None),
    ({"chat_template": [{"name": ["default"], "template": "T"}, {"name": "default", "template": "D"}]}, "D"),
    ({"chat_template": None}, None), ({"chat_template": "  "}, None), ({"chat_template": 7}, None),
    ({"chat_template": ["x", 3]}, None), ({"chat_template": "h\u00e9 \U0001f600"}, "h\u00e9 \U0001f600"),
])  # fmt: skip
def test_the_default_chat_template_is_kept(
    source: Path, settings: dict[str, Any], template: str | None
) -> None:
    write_json(source / "tokenizer_config.json", **settings)
    info, bundle = converted(source)
    assert info.chat_template == (None if template is None else "chat_template.jinja")
    if template is not None:
        assert bundle.read_small("chat_template.jinja").decode() == template


def test_a_template_file_goes_before_the_key(source: Path) -> None:
    write_json(source / "tokenizer_config.json", chat_template="key")
    (source / "chat_template.jinja").write_text("file")
    assert converted(source)[1].read_small("chat_template.jinja") == b"file"


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"chat_template.json": '{"chat_template": "J"}'}, "J"),
        ({"chat_template.json": '{"chat_template": {"default": "J"}}', "chat_template.jinja": "F"}, "F"),
        ({"chat_template.jinja": "F", "additional_chat_templates/rag.jinja": "R"}, "F"),
        ({"tokenizer_config.json": '{"chat_template": {"default": "D", "rag": "R"}}'}, "D"),
        ({"additional_chat_templates/tool_use.jinja": "T"}, "T"),
    ],
)
def test_chat_templates_are_read_from_every_file_that_may_hold_them(
    source: Path, files: dict[str, str], template: str
) -> None:
    for name, text in files.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    assert converted(source)[1].read_small("chat_template.jinja").decode() == template


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": "{{ 'plain' }}\n", "additional_chat_templates/tool_use.jinja": "\n  tools\n"},
        {"chat_template.json": '{"chat_template": {"default": "plain", "tool_use": "\\n  tools"}}'},
        {
            "tokenizer_config.json": '{"chat_template": [{"name": "default", "template": "plain"}, '
            '{"name": "tool_use", "template": "\\n  tools{% if 0 %}{% endif %}"}]}'
        },
    ],
)
def test_a_template_for_tools_is_taken_with_tools(source: Path, files: dict[str, str]) -> None:
    """One template chooses: both are as they are alone, to the last space."""
    for name, text in files.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    template = ChatTemplate(converted(source)[1].read_small("chat_template.jinja").decode())
    assert template._render([], {}, False) == "plain"
    assert template._render([], {"tools": [{}]}, False) == "\n  tools"


def test_a_folder_of_templates_that_is_a_link_is_left_alone(source: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "tool_use.jinja").write_text("theirs")
    (source / "additional_chat_templates").symlink_to(outside)
    assert converted(source)[0].chat_template is None


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("chat_template.jinja", b"\xff\xfe\x00", "isn't UTF-8"),
        ("tokenizer_config.json", b'{"chat_template": "\\ud800"}', "isn't UTF-8"),
        ("chat_template.jinja", b"{% for message in messages %}", "TemplateSyntaxError: .*line 1"),
        ("chat_template.jinja", b"\n{{ messages[0].content.rjust(40) }}", "'rjust' of 'str' .*line 2"),
        ("chat_template.jinja", b"{{ 'x' * messages | length * 9999999 }}", "TemplateLimit: .*line 1"),
        ("chat_template.jinja", b"x" * (MAX_TEMPLATE_CHARS + 1), "has 65537 characters; the limit is 65536"),
        ("chat_template.jinja", "\U0001f600".encode() * (MAX_TEMPLATE_CHARS + 1), "has 65537 characters"),
    ],
)
def test_a_template_that_can_t_be_used_is_left_out_and_said(
    source: Path, caplog: pytest.LogCaptureFixture, name: str, data: bytes, reason: str
) -> None:
    (source / name).write_bytes(data)
    assert converted(source)[0].chat_template is None
    assert re.search(f"(?s){reason}.*; give another with --chat-template FILE", caplog.text)


def test_a_template_may_refuse_a_chat(source: Path) -> None:
    refusing = "{{ raise_exception('not without a system message') }}"
    (source / "chat_template.jinja").write_text(refusing)
    assert converted(source)[1].read_small("chat_template.jinja").decode() == refusing


@pytest.mark.parametrize("character", ["x", "\U0001f600"])
def test_the_longest_template_that_the_runtime_takes(source: Path, character: str) -> None:
    (source / "chat_template.jinja").write_text(character * MAX_TEMPLATE_CHARS)
    longest = converted(source)[1].read_small("chat_template.jinja").decode()
    assert ChatTemplate(longest).render([{"role": "user", "content": "x"}]) == longest


@pytest.mark.parametrize("kind", ["sentencepiece", "tokenizers"])
def test_a_tokenizer_above_the_runtimes_cap_is_refused(source: Path, kind: str) -> None:
    file, limit = TOKENIZER_FILES[kind], MAX_TOKENIZER_BYTES[kind]
    with (source / file).open("wb") as stream:
        stream.truncate(limit + 1)
    assert_refused(source, CheckpointError, f"{file} is larger than {limit} bytes")


def test_a_tokenizer_of_another_model_is_refused(source: Path) -> None:
    byte_level(extra=50).save(str(source / "tokenizer.json"))
    assert_refused(
        source, CheckpointError, r"tokenizer\.json has 309 tokens, but config\.json says vocab_size 300"
    )
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.model").write_bytes(sentencepiece_model(extra=60))
    assert_refused(
        source,
        CheckpointError,
        r"tokenizer\.model has 319 tokens.*: put this model's in its place, or remove it",
    )
    (source / "tokenizer.model").unlink()
    assert converted(source)[0].kind is None


def test_a_much_smaller_tokenizer_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_checkpoint(tmp_path / "source", vocab_size=1000, num_hidden_layers=1)
    byte_level().save(str(source / "tokenizer.json"))
    with caplog.at_level(logging.WARNING):
        converted(source)
    assert "259 tokens for a vocabulary of 1000" in caplog.text


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer.model"])
@pytest.mark.parametrize("content", [b"", b"x", b"{}", b"\xff" * 50, b"[" * 100000, b"\x0a\x05\x0a\x01a\x15"])
def test_a_damaged_tokenizer_is_refused(source: Path, file: str, content: bytes) -> None:
    (source / file).write_bytes(content)
    assert_refused(source, CheckpointError, "tokenizer.*download it again")


def test_a_truncated_tokenizer_is_refused(source: Path) -> None:
    byte_level().save(str(source / "tokenizer.json"))
    whole = (source / "tokenizer.json").read_bytes()
    (source / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    assert_refused(source, CheckpointError, "download it again")


def test_a_tokenizer_the_runtime_cannot_use(source: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.save(str(source / "tokenizer.json"))
    assert_refused(source, UnsupportedModelError, "WordLevel.*without that file the model converts")


def test_the_tokenizers_of_llama_2_and_minimind_are_converted(tmp_path: Path, shared_data: Path) -> None:
    """Llama 2's and MiniMind's own files, each with a model of its vocabulary."""
    llama = write_checkpoint(tmp_path / "llama", vocab_size=32000, num_hidden_layers=1, hidden_size=64)
    (llama / "tokenizer.model").symlink_to(shared_data / "tokenizers" / "llama2" / "tokenizer.model")
    assert_refused(llama, CheckpointError, "leads out")
    (llama / "tokenizer.model").unlink()
    model = (shared_data / "tokenizers" / "llama2" / "tokenizer.model").read_bytes()
    (llama / "tokenizer.model").write_bytes(model)
    info = Bundle.open(convert(llama, tmp_path / "b1")).manifest.tokenizer
    assert info == TokenizerInfo("byte_pairs", 1, (2,), True)
    minimind = write_checkpoint(tmp_path / "minimind", vocab_size=6400, num_hidden_layers=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (minimind / name).write_bytes((shared_data / "tokenizers" / "minimind" / name).read_bytes())
    info = Bundle.open(convert(minimind, tmp_path / "b2")).manifest.tokenizer
    settings = json.loads((minimind / "tokenizer_config.json").read_text())
    assert (info.kind, info.add_bos) == ("byte_pairs", False)
    assert info.chat_template == "chat_template.jinja"
    assert (tmp_path / "b2" / "chat_template.jinja").read_text() == settings["chat_template"]
    names = settings["added_tokens_decoder"]
    assert names[str(info.bos_id)]["content"] == settings["bos_token"]
    assert settings["eos_token"] in [names[str(token)]["content"] for token in info.eos_ids]
