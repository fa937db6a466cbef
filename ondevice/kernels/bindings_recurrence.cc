#include "bindings_recurrence.h"

namespace ondevice {
namespace {

int64_t size(size_t n) { return static_cast<int64_t>(n); }

// Where the states of a tree's tokens lie: a token's last child takes its place, every other one a new place.
std::vector<int32_t> slots_of(const int32_t* parents, int64_t tokens) {
  std::vector<int32_t> last(static_cast<size_t>(tokens), -1), found(static_cast<size_t>(tokens));
  for (int64_t t = 0; t < tokens; ++t) {
    require(parents[t] >= -1 && parents[t] < t, "a parent comes before its child");
    if (parents[t] >= 0) last[static_cast<size_t>(parents[t])] = static_cast<int32_t>(t);
  }
  int32_t slots = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const bool follows = parents[t] >= 0 && last[static_cast<size_t>(parents[t])] == t;
    found[static_cast<size_t>(t)] = follows ? found[static_cast<size_t>(parents[t])] : slots++;
  }
  return found;
}

}  // namespace

void set_heads(RecurrenceArgs& args, int64_t groups, int64_t heads, int64_t rows, int64_t width) {
  require(groups > 0 && heads > 0 && rows > 0 && width > 0, "sizes must be positive");
  require(heads % groups == 0, "heads must be a multiple of their groups");
  args.groups = groups;
  args.heads = heads;
  args.rows = rows;
  args.width = width;
}

void set_weights(RecurrenceArgs& args, const Table& conv, const Weight& conv_bias, const Vector& decay,
                 const Vector& time_bias) {
  args.taps = size(conv.shape(0));
  args.conv = conv.data();
  args.conv_bias = conv_bias ? conv_bias->data() : nullptr;
  args.decay = decay.data();
  args.time_bias = time_bias.data();
  require(args.taps > 1, "a convolution has two taps or more");
  require(size(conv.shape(1)) == args.channels(), "conv is (taps, channels)");
  require(!conv_bias || size(conv_bias->shape(0)) == args.channels(), "conv_bias is (channels,)");
  require(size(decay.shape(0)) == args.heads && size(time_bias.shape(0)) == args.heads,
          "decay and time_bias are (heads,)");
}

void set_state(RecurrenceArgs& args, const Vector& state) {
  require(size(state.shape(0)) == args.state_floats(),
          "states are (heads * rows * width + (taps - 1) * channels,)");
  args.state = state.data();
  args.tail = state.data() + args.head_floats();
}

void set_next_state(RecurrenceArgs& args, const CArray<float, 1>& next_state) {
  require(size(next_state.shape(0)) == args.state_floats(), "both states have one size");
  require(args.state != next_state.data(), "the next state takes other memory");
  args.next_state = next_state.data();
  args.next_tail = next_state.data() + args.head_floats();
}

int64_t set_tokens(RecurrenceArgs& args, const Table& channels, const Table& inputs, int64_t of_token) {
  const int64_t tokens = size(channels.shape(0));
  args.projected = channels.data();
  args.stride = size(channels.shape(1));
  args.inputs = inputs.data();
  require(tokens > 0, "there is a token");
  require(size(inputs.shape(0)) == tokens && size(inputs.shape(1)) == of_token,
          "inputs are (T, those of a token)");
  return tokens;
}

void set_output(RecurrenceArgs& args, const Table& projected, const CArray<float, 2>& out) {
  args.gates = projected.data() + args.channels();
  args.gate_stride = size(projected.shape(1));
  args.out = out.data();
  require(args.gate_stride == args.channels() + args.values(), "projected is (T, channels + values)");
  require(out.shape(0) == projected.shape(0) && size(out.shape(1)) == args.values(), "out is (T, values)");
}

std::vector<int32_t> set_tree(RecurrenceArgs& args, const CArray<const int32_t, 1>& parents, int64_t tokens,
                              int64_t outputs) {
  require(tokens <= kStateTokens, "at most 64 tokens run ahead of a state");
  require(size(parents.shape(0)) == tokens, "parents are (T,)");
  require(outputs > 0 && outputs <= tokens, "the last tokens have outputs");
  args.first = tokens - outputs;
  std::vector<int32_t> slots = slots_of(parents.data(), tokens);
  args.parents = parents.data();
  args.slots = slots.data();
  args.num_slots = *std::max_element(slots.begin(), slots.end()) + 1;
  return slots;
}

}  // namespace ondevice
