"""Every family with experts against `transformers`, within 1e-3 of the largest logit.

Where a router's choice is a near tie, another order of a sum may choose another expert, at that position and
at all after it. So there are many short texts, each compared until its first near tie.

`cpu` keeps keys and values in 16 bits, and that is nearly all that tells it from `transformers`: `reference`
with such keys is as far away. It moves routers' scores too, so that a near tie is a wider one. In a hundred
positions one may be more than 1e-3 away for it, none 2e-3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest

from ondevice.converters.convert import convert
from tests.support.engines import BackendName, all_logits, running
from tests.support.families import CASES, write_model

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")


class Kept(NamedTuple):
    """A backend with its keys' bits, and what it is held to."""

    backend: BackendName
    kv_bits: Literal[32, 16]
    tie: float
    """Margin of a router's scores, of their standard deviation, below which rounding may choose."""
    least: float
    """Share of all positions that has to be left."""
    limit: float
    """Largest difference of logits, of the largest logit."""
    most: float


EXACT = Kept("reference", 32, 1e-4, 0.9, 1e-5, 1e-5)
CPU = Kept("cpu", 16, 3e-3, 0.65, 1e-3, 2e-3)
BESIDE_KEYS = 5e-4
"""The same of `cpu` from `reference` with keys and values of 16 bits."""
ABOVE = 0.01
"""Of the positions of `cpu` at most this share may be above `limit`, and none above `most`."""
TEXTS, LENGTH = 12, 12
FAST = ("olmoe", "qwen3 moe", "mixtral", "phimoe", "granite moe", "qwen2 moe", "glm4 moe", "gemma4 moe")
FAST += (
    "gpt-oss moe",
    "deepseek v2 moe groups",
    "deepseek v3 moe",
    "mimo v2 moe",
    "lfm2 moe",
    "granite hybrid moe",
    "nemotron h moe",
)
"""One of each family; the others are slow."""
EXPERTS = [
    pytest.param(case, marks=() if case in FAST else pytest.mark.slow)
    for case in CASES
    if ("moe" in case or "mixtral" in case)
]


def margins(router: Any, inputs: Any, output: Any) -> np.ndarray:
    """By token, the least difference of scores that decides a router's choice, of their standard deviation.

    Infinite where all experts are chosen. LFM2's routers are given their bias.
    """
    scores, chosen = output[0].reshape(-1, output[0].shape[-1]), output[2].shape[-1]
    kind = type(router).__name__
    if kind.startswith("Phimoe"):
        found = sparsemixer_margins(scores, 2 * router.router_jitter_noise)
    elif kind.startswith(("Glm4Moe", "DeepseekV3", "NemotronH", "MiMoV2Flash")):
        scores = scores.sigmoid() + router.e_score_correction_bias
        groups = scores.reshape(len(scores), router.num_group, -1)
        of_groups = groups.topk(2, dim=-1)[0].sum(dim=-1)
        kept = torch.zeros_like(of_groups).scatter(1, of_groups.topk(router.topk_group)[1], 1) > 0
        left = groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        found = np.minimum(gap(left, chosen), gap(of_groups, router.topk_group))
    elif kind.startswith("Lfm2Moe"):
        scores = scores.sigmoid() + (0.0 if inputs[1] is None else inputs[1])
        found = gap(scores, chosen)
    else:
        # Gemma's router gives chances.
        scores = scores.log() if kind.startswith("Gemma4") else scores
        found = gap(scores, chosen)
    return found / float(scores.std())


def sparsemixer_margins(scores: Any, threshold: float) -> np.ndarray:
    """Of Phi's two experts, and of those that are near enough to one of them to count in its weight."""
    found, left = [], scores
    for _ in range(2):
        best = left.max(dim=-1, keepdim=True)
        found.append(gap(left, 1))
        others = left.scatter(1, best.indices, -torch.inf)
        edge = (best.values - others) - threshold * torch.maximum(others.abs(), best.values)
        found.append(edge.nan_to_num(torch.inf).abs().min(dim=-1).values.numpy())
        left = others
    least: np.ndarray = np.min(found, axis=0)
    return least


def gap(scores: Any, chosen: int) -> np.ndarray:
    """(T,) differences of the last chosen score and the first that isn't."""
    highest = np.sort(scores.numpy(), axis=-1)[:, ::-1]
    if highest.shape[1] == chosen:
        return np.full(len(highest), np.inf)
    return highest[:, chosen - 1] - highest[:, chosen]


def logits_and_margins(model: Any, text: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(T, V) logits of `transformers`, and (T,) the least margin of a router up to each position."""
    found: list[np.ndarray] = []
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("router")]
    hooks = [
        router.register_forward_hook(
            lambda module, inputs, output: found.append(margins(module, inputs, output))
        )
        for router in routers
    ]
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    assert len(found) == len(routers) > 0
    return logits, np.minimum.accumulate(np.min(found, axis=0))


@pytest.mark.fast("deepseek v2 moe groups", "mixtral")
@pytest.mark.parametrize("case", EXPERTS)
def test_decided_positions_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "source", *CASES[case])
    texts: list[list[int]] = np.random.default_rng(8).integers(0, 256, (TEXTS, LENGTH)).tolist()
    both = [logits_and_margins(model, text) for text in texts]
    theirs, margin = (np.concatenate(parts) for parts in zip(*both, strict=True))
    largest = np.abs(theirs).max()
    bundle = convert(tmp_path / "source", tmp_path / "bundle", "f16")

    def ours(backend: BackendName, kv_bits: Literal[32, 16]) -> np.ndarray:
        with running(bundle, backend) as loaded:
            return np.concatenate([all_logits(loaded, text, kv_bits) for text in texts])

    for kept in (EXACT, CPU):
        mine, decided = ours(kept.backend, kept.kv_bits), margin >= kept.tie
        assert decided.mean() >= kept.least, f"{kept.backend}: too few positions are decided"
        far = np.abs(mine - theirs).max(axis=1)[decided] / largest
        print(f"{case}, {kept.backend}: {far.max():.2e} at {decided.sum()} of {len(decided)} positions")
        assert far.max() < kept.most
        assert (far >= kept.limit).mean() <= ABOVE
        if kept is CPU:
            beside = np.abs(mine - ours("reference", 16)).max(axis=1)[decided] / largest
            assert beside.max() < BESIDE_KEYS
