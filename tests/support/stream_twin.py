"""What `converters/training/streams/loss.py` computes, again, in torch and float64, without our code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ondevice.bundle.streams import MultiStreams


class StreamTwin:
    """The loss in torch and float64, as the paper has it: one mask over the text and all its streams."""

    def __init__(
        self,
        top: Any,
        window: Any,
        streams: MultiStreams,
        run: range,
        resident_tokens: int,
        stream_weight: float,
    ) -> None:
        self.torch = pytest.importorskip("torch")
        self.weights, self.config, self.streams = top.weights, top.config, streams
        self.tokens, self.x = window.tokens, self.tensor(window.layer_inputs)
        self.run, self.resident_tokens, self.stream_weight = run, resident_tokens, stream_weight
        length, count = len(window.tokens), streams.streams
        rows = [(t, 0) for t in range(length)] + [(t, j) for t in self.run for j in range(1, count + 1)]
        self.at = np.array([t + j for t, j in rows])
        self.sees = np.array(
            [[(b <= a) if not j else bool(i) and b == a and j <= i for b, j in rows] for a, i in rows]
        )
        self.owner = np.array([t for t, _ in rows])
        self.first_stream = length

    def tensor(self, array: Any) -> Any:
        return self.torch.tensor(np.array(array), dtype=self.torch.float64)

    def norm(self, x: Any, weight: Any) -> Any:
        """weight: an array, or a model's `Norm`."""
        weight = getattr(weight, "weight", weight)
        scale = (x.square().mean(-1, keepdim=True) + self.config.norm.eps).rsqrt()
        return x * scale * self.tensor(weight)

    def rotated(self, x: Any) -> Any:
        half = self.config.head_dim // 2
        angles = self.at[:, None] * np.array(self.config.ropes[0].frequencies)
        cos, sin = (self.tensor(f(angles))[:, None] for f in (np.cos, np.sin))
        first, second = x[..., :half], x[..., half:]
        return self.torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def added(self, y: Any, x: Any, name: str, relu: bool = False) -> Any:
        low = x @ self.given[f"{name}.down"].T
        change = (low.relu() if relu else low) @ self.given[f"{name}.up"].T
        first = 0 if self.streams.mode == "shared" else self.first_stream
        return y + change * self.tensor(np.arange(len(self.at)) >= first)[:, None]

    def attention(self, i: int, layer: Any, x: Any) -> Any:
        config, h = self.config, self.norm(x, layer.attention_norm)
        qkv = h @ self.tensor(layer.qkv.weight).T + self.tensor(layer.qkv.bias)
        qkv = self.added(qkv, h, f"layers.{i}.qkv").reshape(len(x), -1, config.head_dim)
        q, k, v = qkv.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], 1)
        q, k = self.rotated(self.norm(q, layer.head_norms.q)), self.rotated(self.norm(k, layer.head_norms.k))
        k, v = (side.repeat_interleave(config.num_heads // config.num_kv_heads, 1) for side in (k, v))
        sees, window = self.sees, config.layers[i].attention.window
        if window:
            sees = sees & (self.at[None, :] > self.at[:, None] - window)
        scores = self.torch.einsum("qhd,khd->hqk", q, k) / config.head_dim**0.5
        scores = scores.masked_fill(~self.torch.tensor(sees), -np.inf)
        context = self.torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(x), -1)
        return x + self.added(context @ self.tensor(layer.out.weight).T, context, f"layers.{i}.out")

    def feed_forward(self, i: int, layer: Any, x: Any) -> Any:
        h, weights = self.norm(x, layer.feed_forward_norm), layer.feed_forward
        gates = (h @ self.tensor(weights.gate).T).relu()
        if self.resident_tokens:
            used, of = gates[: self.first_stream] > 0, self.owner[self.first_stream :]
            masks = [used[max(0, t + 1 - self.resident_tokens) : t + 1].any(0) for t in of]
            gates = gates * self.torch.cat([self.torch.ones_like(used), self.torch.stack(masks)])
        change = gates * (h @ self.tensor(weights.up).T) @ self.tensor(weights.down)
        return x + self.added(change, h, f"layers.{i}.feed_forward", relu=True)

    def logits(self, x: Any) -> Any:
        return self.norm(x, self.weights.final_norm) @ self.tensor(self.weights.head.weight).T

    def loss_and_gradients(self, parameters: dict[str, Any]) -> tuple[float, dict[str, np.ndarray]]:
        self.given = {name: self.tensor(values).requires_grad_() for name, values in parameters.items()}
        begun = self.x[self.run.start : self.run.stop, None] + self.given["embeddings"]
        x = self.torch.cat([self.x, begun.flatten(0, 1)])
        for i, layer in enumerate(self.weights.layers):
            x = self.feed_forward(i, layer, self.attention(i, layer, x))
        said, guessed = self.logits(x).log_softmax(-1).split([self.first_stream, len(x) - self.first_stream])
        loss, shared = 0.0, self.streams.mode == "shared"
        chances = said.detach().exp()
        one_hot = self.torch.eye(self.config.vocab_size, dtype=self.torch.float64)[self.tokens]
        for n, t in enumerate(self.run):
            for j in range(1, self.streams.streams + 1):
                weight = self.stream_weight if shared else 1 / self.streams.streams
                loss = loss - weight * (
                    chances[t + j] * guessed[n * self.streams.streams + j - 1]
                ).sum() / len(self.run)
        if shared:
            loss = loss - (one_hot[1:] * said[:-1]).sum() / (len(self.tokens) - 1)
        loss.backward()
        return loss.item(), {name: values.grad.numpy() for name, values in self.given.items()}
