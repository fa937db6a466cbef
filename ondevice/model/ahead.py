"""Passes that run ahead of the states of recurrent layers, and the replay of what stays of them."""

from __future__ import annotations

from ondevice.backends.base import Backend
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.model.sequence_state import SequenceState
from ondevice.model.weights import ModelWeights
from ondevice.model_config import ModelConfig


def begin_states(
    config: ModelConfig, backend: Backend, weights: ModelWeights, kv: SequenceState, batch: ForwardBatch
) -> None:
    """Prepare states for a pass over `batch`: one of tokens that may be taken back runs ahead of them, others
    go by way of a mark among their tokens.
    """
    if kv.states is None:
        return
    tree = None if batch.tree is None or batch.tree.is_chain else batch.tree
    if batch.drafted or batch.resident_only or tree is not None:
        kv.states.run_ahead(len(batch.tokens), tree)
    else:
        settle(config, backend, weights, kv, kv.length)
        kv.states.go_by(len(batch.tokens))


def settle(
    config: ModelConfig, backend: Backend, weights: ModelWeights, kv: SequenceState, n_tokens: int
) -> None:
    """Bring the states behind the first n_tokens in kv, if the last of these ran ahead."""
    states = kv.states
    if states is None or states.position >= n_tokens:
        return

    def replay(count: int) -> None:
        for layer in config.recurrent_layers:
            spec, own = config.layers[layer], weights.layers[layer]
            if spec.delta is not None and own.delta is not None:
                backend.replay_delta(states, layer, count, spec.delta, own.delta)
            elif spec.mamba2 is not None and own.mixer is not None:
                backend.replay_mamba2(states, layer, count, spec.mamba2, own.mixer)
            else:
                backend.replay_conv(states, layer, count)

    kv.settle(n_tokens, replay)
