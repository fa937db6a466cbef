"""Llama 1 to 3, and the many checkpoints that declare themselves a Llama, ReluLLaMA among them.

ProSparse (arXiv 2402.13516) is a Llama with gates that are exactly zero up to a threshold.
"""

from __future__ import annotations

from ondevice.converters.architectures.common import Description, Family, check_code, read_llama
from ondevice.converters.architectures.config_reader import ConfigReader
from ondevice.errors import UnsupportedModelError

SPARSE_CLASS = "SparseLlamaForCausalLM"


def _read(reader: ConfigReader) -> Description:
    sparse = reader.texts("architectures") == [SPARSE_CLASS]
    bias = reader.boolean("attention_bias", False)
    reader.only("mlp_bias", False)
    reader.only("pretraining_tp", 1)
    if sparse:
        check_code(reader, "sparsellama")
        # Without an effect but for fatrelu.
        reader.number("hidden_act_param", 0.0)
    config = read_llama(reader, "llama", max_context=2048, attention={"bias": bias, "output_bias": bias})
    if sparse and not config.zeros_gates:
        # Others gave the name to models of sparse attention.
        raise UnsupportedModelError(
            f"config.json: {SPARSE_CLASS} with hidden_act {config.activation!r} isn't known; with fatrelu or "
            "relu it is ProSparse"
        )
    return Description(config)


LLAMA = Family("llama", "LlamaForCausalLM", _read, (SPARSE_CLASS,))
SPARSE_LLAMA = Family("sparsellama", SPARSE_CLASS, _read)
