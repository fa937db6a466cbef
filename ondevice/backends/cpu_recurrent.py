"""Layers with recurrent states of the CPU backend: delta rules, Mamba-2 mixers, short convolutions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from ondevice.backends.base import Float32
from ondevice.backends.recurrent import DeltaWeights, MixerWeights, StateStore, replay_conv
from ondevice.kernels import _native
from ondevice.model_config import ConvSpec, DeltaSpec, Mamba2Spec

if TYPE_CHECKING:
    from ondevice.kernels._mamba2 import MixerSizes


def native_mixer(spec: Mamba2Spec) -> MixerSizes:
    """The kernels' description of a mixer's sizes and constants."""
    max_time = math.inf if spec.most_time is None else spec.most_time
    sizes = spec.groups, spec.heads, spec.state_width, spec.head_width
    factors = spec.time_factor, spec.gate_factor, spec.out_factor
    return *sizes, *factors, spec.least_time, max_time, spec.norm_groups, spec.norm == "before"


class CpuRecurrent(Protocol):
    """The ops of `CpuBackend` on recurrent states."""

    runner: _native.Runner

    def _buffer(self, op: str, shape: tuple[int, int]) -> Float32:
        """An op's output array of this shape, re-used."""

    def gated_delta(
        self,
        projected: Float32,
        gates: Float32,
        states: StateStore,
        layer: int,
        spec: DeltaSpec,
        weights: DeltaWeights,
    ) -> Float32:
        out = self._buffer("attention", (len(projected), spec.value_size))
        state, ahead = states.state(layer), states.ahead(layer)
        if ahead is None:
            after = states.next_state(layer)
            _native.gated_delta(self.runner, projected, gates, spec.sizes, weights, state, after, out)
            return out
        ahead.keep(projected, gates)
        _native.gated_delta_ahead(self.runner, *ahead, projected, spec.sizes, weights, state, out)
        return out

    def replay_delta(
        self, states: StateStore, layer: int, count: int, spec: DeltaSpec, weights: DeltaWeights
    ) -> None:
        channels, gates = states.inputs(layer, count)
        state, after = states.state(layer), states.next_state(layer)
        _native.replay_delta(self.runner, channels, gates, spec.sizes, weights, state, after)

    def short_conv(
        self, projected: Float32, states: StateStore, layer: int, spec: ConvSpec, weights: Float32
    ) -> Float32:
        out = self._buffer("attention", (len(projected), spec.channels))
        state, ahead = states.state(layer), states.ahead(layer)
        if ahead is None:
            _native.short_conv(self.runner, projected, weights, state, states.next_state(layer), out)
        else:
            inputs, parents = ahead.channels, ahead.parents
            _native.short_conv_ahead(self.runner, inputs, parents, projected, weights, state, out)
        return out

    def replay_conv(self, states: StateStore, layer: int, count: int) -> None:
        replay_conv(states, layer, count)

    def sigmoid_gated(self, x: Float32, gates: Float32) -> Float32:
        _native.sigmoid_gate(self.runner, gates, x)
        return x

    def mamba2(
        self,
        projected: Float32,
        steps: Float32,
        states: StateStore,
        layer: int,
        spec: Mamba2Spec,
        weights: MixerWeights,
    ) -> Float32:
        out = self._buffer("attention", (len(projected), spec.value_size))
        state, ahead, mixer = states.state(layer), states.ahead(layer), native_mixer(spec)
        if ahead is None:
            after = states.next_state(layer)
            _native.mamba2(self.runner, projected, steps, mixer, weights, state, after, out)
            return out
        ahead.keep(projected, steps)
        _native.mamba2_ahead(self.runner, *ahead, projected, mixer, weights, state, out)
        return out

    def replay_mamba2(
        self, states: StateStore, layer: int, count: int, spec: Mamba2Spec, weights: MixerWeights
    ) -> None:
        channels, steps = states.inputs(layer, count)
        state, after = states.state(layer), states.next_state(layer)
        _native.replay_mamba2(self.runner, channels, steps, native_mixer(spec), weights, state, after)
