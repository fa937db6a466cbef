"""Every type of GGUF's that bundles copy, on real weights: the 1.5B, quantised anew by llama.cpp."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

import ondevice
from ondevice.bundle.reader import Bundle
from tests.support.engines import each_weight
from tests.support.gguf_models import gguf_name
from tests.support.real_models import real_model

gguf = pytest.importorskip("gguf")

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(1800)]

FILE_TYPES = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 14,
    "Q5_K": 16,
    "Q6_K": 18,
    "IQ4_NL": 25,
    "IQ4_XS": 30,
}
"""llama.cpp's numbers of file types. It makes MXFP4 of experts alone."""
MOST_BYTES = 1.02
"""Of a bundle, times the bytes of its source's tensors."""


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_values_are_those_of_the_file_bit_for_bit(kind: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    source, path = real_model("qwen2.5-coder-1.5b"), tmp_path / "model.gguf"
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread, options.pure, options.allow_requantize = FILE_TYPES[kind], 2, True, True
    assert not llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(options))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    bundle = Bundle.open(ondevice.convert(path, tmp_path / "bundle"))
    compared = set()
    for name, values in each_weight(bundle.path):
        tensor = tensors[gguf_name(name)]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert values.ndim == 1 or tensor.tensor_type.name == kind, name
        assert np.array_equal(values, expected), name
        compared.add(tensor.name)
    assert compared == set(tensors)
    files = bundle.manifest.files.items()
    stored = sum(entry.nbytes for name, entry in files if name.endswith(".safetensors"))
    assert stored <= MOST_BYTES * sum(int(tensor.n_bytes) for tensor in tensors.values())
