"""A model's memory under the reference backend. All sizes are bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import prod

from ondevice.budget.cpu_memory import CpuMemory
from ondevice.budget.sizes import BufferShape, MatrixShape, SegmentShape, segment_shape
from ondevice.bundle.weight_shapes import extra_matrices
from ondevice.records import dataclass


@dataclass(frozen=True)
class ReferenceMemory(CpuMemory):
    """Memory of numpy: every matrix in float32, embedding rows from flash, nothing offloaded."""

    @property
    def weights_bytes(self) -> int:
        config = self.config
        rows = config.feed_forward.num_rows * config.num_neurons
        rows += sum(config.out_cols(layer) + config.qkv_rows(layer) for layer in config.layers)
        # The gates of cutoffs are there twice.
        rows += sum(map(config.neurons, config.cut_off_layers))
        others = sum(prod(weight.shape) for weight in extra_matrices(config))
        others += config.embedding_size * config.logits_size + config.positions_size
        return 4 * (config.hidden_size * rows + others)

    @property
    def looks_up_head(self) -> bool:
        return False

    @property
    def embedding_bytes(self) -> int:
        return 0

    @property
    def segment(self) -> SegmentShape:
        return replace(segment_shape(self.config, self.quant), per_layer=())

    @property
    def dense(self) -> SegmentShape | None:
        """None: every neuron is among `weights_bytes`."""
        return None

    @cached_property
    def matrices(self) -> MatrixShape | None:
        """None: every matrix is among `weights_bytes`."""
        return None

    @property
    def buffers(self) -> BufferShape:
        return BufferShape(0, 0, 0, 0)

    def activation_bytes(self, tokens: int) -> int:
        """Bytes of the kernels' activations and numpy's temporaries, for a pass of any width.

        Temporaries are wide hidden values, all scores, and keys and values that are read back.
        """
        config, context, chunk = self.config, self.max_context, self.pass_tokens
        hidden = 16 * chunk * config.widest
        temporaries = hidden + 8 * chunk * context + 6 * config.kv_size * context
        return super().activation_bytes(chunk) + 4 * temporaries
