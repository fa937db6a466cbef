"""The strict reader of `config.json`.

A key is *read* (it decides the arithmetic), *harmless* (it can't change a forward pass), or refused by name,
because ignoring an unknown key could give a wrong model. Keys that are null or empty are never refused. A key
that is false is refused, unless false is known to mean the same as a missing key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ondevice.errors import CheckpointError, UnsupportedModelError

# fmt: off
HARMLESS_KEYS = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled", "_name_or_path",
    "architectures", "attention_dropout", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "cache_implementation", "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "dtype",
    "early_stopping", "eos_token_id", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "generation_config", "hidden_dropout", "id2label",
    "initializer_range",
    "is_llama_config", "keys_to_ignore_at_inference", "label2id", "length_penalty", "max_length",
    "max_sequence_length", "min_length", "model_type", "name_or_path", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_scores", "pad_token_id",
    "prefix", "problem_type", "remove_invalid_values", "repetition_penalty", "resid_pdrop", "return_dict",
    "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature",
    "tokenizer_class", "top_k", "top_p", "torch_dtype", "transformers.js_config", "transformers_version",
    "typical_p", "unk_token_id", "unsloth_fixed", "unsloth_version", "use_cache",
})
UNLESS_TRUE = frozenset({
    "add_bias_linear", "add_cross_attention", "alibi", "apply_residual_connection_post_layernorm",
    "attention_bias", "attention_k_eq_v", "attention_out_bias", "enable_moe_block",
    "gradient_checkpointing", "is_decoder", "is_moe", "lm_head_bias", "mlp_bias", "mup_enabled", "norm_bias",
    "output_router_logits", "qk_layernorm", "qk_norm", "qkv_bias", "reorder_and_upcast_attn",
    "rope_interleaved", "scale_attn_by_inverse_layer_idx", "tf_legacy_loss", "tie_encoder_decoder",
    "torchscript", "use_bfloat16", "use_bidirectional_attention", "use_double_wide_mlp", "use_dynamic_ntk",
    "use_flash_attn", "use_logn_attn", "use_long_context", "use_mrope", "use_qk_norm", "use_qkv_bias",
    "use_sliding_window",
})
"""Keys that change the arithmetic only if they are true."""
# fmt: on
CONFIG_REMEDY = "take config.json from the model's own repository"
SAME_REPOSITORY = "take config.json and the weights from the same repository"
"""Remedies: for a damaged config, and for tensors that don't match it."""
INTEGER_LIMIT = 1 << 64
"""JSON has integers of any length, of which the longer ones are no floats."""


class ConfigReader:
    """Reads `config.json` key by key. It remembers the keys read, so that `close` can refuse the others."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        """values: the keys and values. where: what they are part of, for messages."""
        self._values = values
        self.where = where
        self._read: set[str] = set()

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer below 2^64. A missing or null key gives the default; without a default, raises
        CheckpointError.
        """
        value = self._value(key, default)
        if type(value) is not int or abs(value) >= INTEGER_LIMIT:
            raise self._wrong(key, value, "an integer of at most 64 bits")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number, as a float."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not -1e300 < value < 1e300:
            raise self._wrong(key, value, "a number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "text")
        return value

    def section(self, key: str) -> dict[str, Any] | None:
        """A JSON object; None if the key is missing, null or empty."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return value or None

    def texts(self, key: str) -> list[str] | None:
        """A list of strings; None if the key is missing, null or empty."""
        value = self._value(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, value, "a list of names")
        return value or None

    def numbers(self, key: str) -> list[float] | None:
        """A list of finite numbers; None if the key is missing, null or empty."""
        value = self._value(key, [])
        if not isinstance(value, list) or not all(
            type(item) in (int, float) and abs(item) < 1e300 for item in value
        ):
            raise self._wrong(key, value, "a list of numbers")
        return [float(item) for item in value] or None

    def values_of(self, key: str) -> list[Any]:
        """The value of a key as a list, even if it isn't in a list. The key doesn't count as read."""
        value = self._values.get(key)
        return value if isinstance(value, list) and value else [value]

    def with_value(self, key: str, value: object) -> ConfigReader:
        """A reader with another value for `key`. It shares this reader's record of keys that have
        been read.
        """
        other = ConfigReader({**self._values, key: value}, self.where)
        other._read = self._read
        return other

    def has(self, key: str) -> bool:
        """True if the key is there, even with the value null."""
        return key in self._values

    def is_null(self, key: str) -> bool:
        """True if the key is there with the value null."""
        return self.has(key) and self._values[key] is None

    def only(self, key: str, allowed: object) -> None:
        """Check that `key` has the value `allowed`, or null. Raises an error that names it if not."""
        value = self._value(key, allowed)
        if value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
            raise UnsupportedModelError(
                f"{self.where}: {key} is {shown(value)}, which this converter doesn't implement"
            )

    def close(self, harmless: frozenset[str] = frozenset()) -> None:
        """Check that every key was read or is harmless. Raises an error for another, unless its value has no
        effect.
        """
        unknown = [
            key
            for key, value in self._values.items()
            if key not in self._read and key not in harmless and not _says_nothing(key, value)
        ]
        if unknown:
            listed = ", ".join(
                f"{ascii(key)[1:-1][:80]} = {shown(self._values[key])}" for key in sorted(unknown)[:8]
            )
            raise UnsupportedModelError(
                f"{self.where} has keys that may change the arithmetic and aren't known here: {listed}"
            )

    def _value(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(
                f"{self.where} has no {key}, without which no model can be read; download it again"
            )
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key} is {shown(value)}; it must be {wanted}")


def shown(value: object) -> str:
    """`value` as a short piece of ASCII for a message."""
    try:
        text = ascii(value)
    except RecursionError:
        # What could just be parsed may nest too deeply to be written.
        text = "nested too deeply"
    return text if len(text) <= 60 else text[:57] + "..."


def _says_nothing(key: str, value: object) -> bool:
    return value is None or value in ({}, [], "") or (value is False and key in UNLESS_TRUE)
