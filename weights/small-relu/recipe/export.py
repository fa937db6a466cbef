"""Exports a run's checkpoint as a Hugging Face folder, and loads the models of checkpoints and bundles.

    python -m recipe.export --name small-relu

writes the folder from which `ondevice convert` makes the bundle, as from any other model's folder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from ondevice.backends.reference import ReferenceBackend
from ondevice.bundle.reader import Bundle
from ondevice.converters.architectures.rotary import base_of
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files, load_weights
from recipe.config import BUILD, Shape
from recipe.model import Llama
from recipe.tokenizer import Encoder, write_tokenizer
from recipe.train import load_checkpoint, training_of

SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
"""Default sampling of `ondevice chat`."""


def hugging_face_config(shape: Shape, bos_id: int, end_id: int) -> dict[str, Any]:
    is_mixture = shape.num_experts > 0
    experts = {
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "norm_topk_prob": False,
    }
    return {
        "architectures": ["OlmoeForCausalLM" if is_mixture else "LlamaForCausalLM"],
        "model_type": "olmoe" if is_mixture else "llama",
        **(experts if is_mixture else {}),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_attention_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "hidden_act": shape.hidden_act,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "bos_token_id": bos_id,
        "eos_token_id": end_id,
        "torch_dtype": "float32",
    }


def export(model: Llama, tokenizer: bytes, folder: Path) -> None:
    """Write the folder: config, float32 weights, tokenizer with chat template, sampling defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder = Encoder(tokenizer)
    config = hugging_face_config(model.shape, encoder.bos_id, encoder.end_id)
    # Plain text ends at <s>, where the next document would begin.
    ends = {"bos_token_id": encoder.bos_id, "eos_token_id": [encoder.end_id, encoder.bos_id]}
    for name, values in (("config.json", config), ("generation_config.json", ends | SAMPLING)):
        (folder / name).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    write_tokenizer(folder, tokenizer, model.shape.max_position_embeddings)
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def model_of_checkpoint(folder: Path, unfinished: bool = False) -> Llama:
    """The model of a run's folder. Raises ValueError for an unfinished run, unless `unfinished` allows it."""
    state = load_checkpoint(folder)
    if not unfinished and state["step"] < sum(state["decay"]):
        raise ValueError(
            f"{folder} is at step {state['step']} of {sum(state['decay'])}: go on with training, or let it "
            "end early with --decay; --unfinished takes it as it is"
        )
    model = Llama(training_of(state).shape)
    model.load_state_dict(state["model"])
    return model


def model_of_bundle(folder: Path) -> Llama:
    """The model with a bundle's dequantised weights; no float checkpoint is needed."""
    bundle = Bundle.open(folder)
    config = bundle.config
    activation = config.activation
    if config.architecture != "llama" or not config.tie_embeddings or activation not in ("relu", "silu"):
        raise ValueError(f"{folder} isn't a model of this recipe")
    shape = Shape(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_context,
        hidden_act=activation,
        rms_norm_eps=config.norm.eps,
        rope_theta=base_of(config.ropes[0]),
    )
    with FlashReader(bundle_files(bundle)) as reader:
        loaded = load_weights(bundle, reader, ReferenceBackend())
    assert loaded.final_norm is not None
    weights = {
        "model.norm.weight": loaded.final_norm.weight,
        "model.embed_tokens.weight": loaded.head.weight,
    }
    for i, layer in enumerate(loaded.layers):
        neurons, qkv = layer.feed_forward, np.split(layer.qkv.weight, 3)
        assert layer.attention_norm is not None
        assert layer.feed_forward_norm is not None
        matrices = dict(zip(("q_proj", "k_proj", "v_proj"), qkv, strict=True)) | {"o_proj": layer.out.weight}
        parts = {f"self_attn.{name}": matrix for name, matrix in matrices.items()} | {
            "input_layernorm": layer.attention_norm.weight,
            "post_attention_layernorm": layer.feed_forward_norm.weight,
            "mlp.gate_proj": neurons.gate,
            "mlp.up_proj": neurons.up,
            "mlp.down_proj": neurons.down.T,
        }
        weights |= {f"model.layers.{i}.{name}.weight": values for name, values in parts.items()}
    model = Llama(shape)
    model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in weights.items()})
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a run's model as a Hugging Face folder.")
    parser.add_argument("--name", default="small-relu", help="the run's folder under BUILD/runs")
    parser.add_argument("--build", type=Path, default=BUILD)
    parser.add_argument("--output", type=Path, help="BUILD/export/NAME unless given")
    parser.add_argument("--unfinished", action="store_true", help="take a run that isn't at its end")
    arguments = parser.parse_args()
    folder = arguments.output or arguments.build / "export" / arguments.name
    tokenizer = (arguments.build / "tokenizer.model").read_bytes()
    run = arguments.build / "runs" / arguments.name
    export(model_of_checkpoint(run, arguments.unfinished), tokenizer, folder)
    print(json.dumps({"folder": str(folder)}))


if __name__ == "__main__":
    main()
