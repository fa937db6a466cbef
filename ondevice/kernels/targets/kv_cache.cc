#include "kv_block.h"
#include "simd.h"
#include "target_kernels.h"

namespace ondevice {
namespace ONDEVICE_NS {
namespace {

// Copies one position's key and value without converting them.
void copy_position(const KvView& kv, const Head& from, int64_t from_slot, const Head& to, int64_t to_slot) {
  const int64_t bytes = kv.bits / 8, row = kv.value_dim() * bytes;
  const uint8_t* key = from.keys + key_index(from_slot, kv.head_dim) * bytes;
  uint8_t* copy = to.keys + key_index(to_slot, kv.head_dim) * bytes;
  for (int64_t d = 0; d < kv.head_dim; ++d)
    memcpy(copy + d * kLanes * bytes, key + d * kLanes * bytes, static_cast<size_t>(bytes));
  if (!kv.latent) memcpy(to.values + to_slot * row, from.values + from_slot * row, static_cast<size_t>(row));
  if (!from.key_scales) return;
  to.key_scales[to_slot] = from.key_scales[from_slot];
  to.value_scales[to_slot] = from.value_scales[from_slot];
}

// An int8 code per value, and scale = max|x| / 127. A zero vector has the scale 0, one that isn't finite NaN.
void quantize_head(const float* x, int64_t n, int8_t* codes, int64_t stride, float* scale) {
  F magnitude = zero();
  for (int64_t i = 0; i < n; i += 16) magnitude = max_magnitude(magnitude, load_partial(x + i, n - i));
  const float m = largest_magnitude(magnitude);
  const float inverse = int8_inverse(m);
  for (int64_t i = 0; i < n; i += 16) {
    int8_t lanes[16] = {0};
    if (m == m) store_int8(lanes, mul(load_partial(x + i, n - i), set1(inverse)));
    for (int64_t k = 0; k < 16 && i + k < n; ++k) codes[(i + k) * stride] = lanes[k];
  }
  *scale = m / 127.0f;
}

void half_head(const float* x, int64_t n, uint16_t* out, int64_t stride) {
  for (int64_t i = 0; i < n; i += 16) {
    uint16_t lanes[16];
    store_half(lanes, load_partial(x + i, n - i));
    for (int64_t k = 0; k < 16 && i + k < n; ++k) out[(i + k) * stride] = lanes[k];
  }
}

}  // namespace

void kv_write(const KvView& kv, int64_t position, const float* k, const float* v) {
  const int64_t slot = position % kKvBlock, key_at = key_index(slot, kv.head_dim), value_dim = kv.value_dim();
  for (int64_t head = 0; head < kv.heads; ++head) {
    const Head at = head_at(kv, position / kKvBlock, head);
    const float* key = k + head * kv.head_dim;
    if (kv.latent && kv.bits == 8) {
      int8_t* codes = reinterpret_cast<int8_t*>(at.keys) + key_at;
      quantize_head(key, kv.latent, codes, kLanes, at.value_scales + slot);
      quantize_head(key + kv.latent, kv.head_dim - kv.latent, codes + kv.latent * kLanes, kLanes,
                    at.key_scales + slot);
      continue;
    }
    if (kv.latent) {
      half_head(key, kv.head_dim, reinterpret_cast<uint16_t*>(at.keys) + key_at, kLanes);
      continue;
    }
    const float* value = v + head * value_dim;
    if (kv.bits == 16) {
      half_head(key, kv.head_dim, reinterpret_cast<uint16_t*>(at.keys) + key_at, kLanes);
      half_head(value, value_dim, reinterpret_cast<uint16_t*>(at.values) + slot * value_dim, 1);
    } else {
      quantize_head(key, kv.head_dim, reinterpret_cast<int8_t*>(at.keys) + key_at, kLanes,
                    at.key_scales + slot);
      quantize_head(value, value_dim, reinterpret_cast<int8_t*>(at.values) + slot * value_dim, 1,
                    at.value_scales + slot);
    }
  }
}

void kv_move(const KvView& kv, int64_t from, int64_t to) {
  for (int64_t head = 0; head < kv.heads; ++head)
    copy_position(kv, head_at(kv, from / kKvBlock, head), from % kKvBlock, head_at(kv, to / kKvBlock, head),
                  to % kKvBlock);
}

}  // namespace ONDEVICE_NS
}  // namespace ondevice
