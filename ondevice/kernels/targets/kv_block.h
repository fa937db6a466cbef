// Where a KV block keeps keys and values, for the kernels that write and read them.
#pragma once

#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {

constexpr int64_t kLanes = 16;

// A block holds 64 positions of each (layer, kv head):
//   8 bits:  keys int8 (4, head_dim, 16), key scales f32 (64), values int8 (64, value_dim), value scales f32
//   16 bits: keys float16 (4, head_dim, 16), values float16 (64, value_dim)
// Where values are the first `latent` dimensions of keys, keys alone are stored. At 8 bits these dimensions
// have the value scales, and the others the key scales: keys int8, value scales f32 (64), key scales f32
// (64). The keys of 16 positions are stored dimension by dimension, so that all 16 are scored at once, each
// by a sum over ascending dimensions. So a score depends on nothing but its query and its key.
struct Head {
  uint8_t* keys;
  float* key_scales;
  uint8_t* values;
  float* value_scales;
};

// Index of dimension 0 of a position's key; the next dimension is kLanes further.
ONDEVICE_INLINE int64_t key_index(int64_t slot, int64_t head_dim) {
  return slot / kLanes * kLanes * head_dim + slot % kLanes;
}

ONDEVICE_INLINE Head head_in(const KvView& kv, uint8_t* base) {
  const int64_t codes = kKvBlock * kv.head_dim * kv.bits / 8;
  if (kv.latent) {
    float* scales = kv.bits == 16 ? nullptr : reinterpret_cast<float*>(base + codes);
    return {base, scales ? scales + kKvBlock : nullptr, base, scales};
  }
  if (kv.bits == 16) return {base, nullptr, base + codes, nullptr};
  float* key_scales = reinterpret_cast<float*>(base + codes);
  uint8_t* values = base + codes + kKvBlock * 4;
  return {base, key_scales, values, reinterpret_cast<float*>(values + kKvBlock * kv.value_dim())};
}

ONDEVICE_INLINE Head head_at(const KvView& kv, int64_t block, int64_t head) {
  return head_in(kv, kv.blocks[block] + kv.layer_offset + head * kv.head_bytes);
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
