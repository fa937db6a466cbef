// Pieces of the Python module `ondevice.kernels._native`; each checks what its kernels take for granted.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "layers.h"

namespace ondevice {

namespace nb = nanobind;

template <class T, size_t N>
using CArray = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

using Weight = std::optional<CArray<const float, 1>>;

// A norm over rows of `cols` floats, or none.
inline Norm norm_of(const Weight& weight, float eps, int64_t cols) {
  if (!weight) return {};
  require(static_cast<int64_t>(weight->shape(0)) == cols, "a norm's weight is as long as what it norms");
  return {weight->data(), eps};
}

void bind_layers(nb::module_& m);
void bind_flash(nb::module_& m);

}  // namespace ondevice
