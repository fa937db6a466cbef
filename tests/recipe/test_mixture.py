"""The recipe's mixture of experts in PyTorch: `transformers` computes the same from what is exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from recipe.config import SIZES  # noqa: E402
from recipe.export import export  # noqa: E402
from recipe.model import Llama  # noqa: E402
from tests.support.paths import SHIPPED  # noqa: E402

SHAPE = replace(
    SIZES["tiny"],
    hidden_act="silu",
    vocab_size=4096,
    num_experts=8,
    num_experts_per_tok=3,
    intermediate_size=32,
)


def made() -> Llama:
    torch.manual_seed(4)
    model = Llama(SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_an_exported_mixture_is_the_same_in_transformers(tmp_path: Path) -> None:
    model = made()
    export(model, (SHIPPED / "tokenizer.model").read_bytes(), tmp_path)
    theirs = transformers.OlmoeForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == SHAPE.parameters
    ids = torch.randint(0, SHAPE.vocab_size, (2, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        mine, _ = model.logits_and_gates(ids)
        expected = theirs(ids).logits
    assert (mine - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_balance_loss_is_that_of_transformers_and_reaches_every_router() -> None:
    model = made()
    ids = torch.randint(0, SHAPE.vocab_size, (2, 41), generator=torch.Generator().manual_seed(6))
    seen: list[torch.Tensor] = []
    for block in model.model.layers:
        block.mlp.gate.register_forward_hook(lambda module, inputs, output: seen.append(output))
    _, stats = model.loss(ids)
    loss = transformers.models.olmoe.modeling_olmoe.load_balancing_loss_func
    # Theirs counts all layers as one, and a choice as one of k.
    for logits, (_, balance) in zip(seen, stats, strict=True):
        theirs = loss((logits,), SHAPE.num_experts, SHAPE.num_experts_per_tok)
        assert balance.item() == pytest.approx(theirs.item() / SHAPE.num_experts_per_tok, rel=1e-5)
    stats[:, 1].mean().backward()
    assert all(block.mlp.gate.weight.grad.abs().max() > 0 for block in model.model.layers)


def test_experts_that_nothing_chose_have_gradients_of_zeros() -> None:
    model = made()
    model.loss(torch.full((1, 2), 7))[0].backward()
    used = [
        expert.down_proj.weight.grad.any().item()
        for block in model.model.layers
        for expert in block.mlp.experts
    ]
    assert sum(used) == SHAPE.num_hidden_layers * SHAPE.num_experts_per_tok
