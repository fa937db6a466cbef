// Pieces of the Python module `ondevice.kernels._native`; each checks what its kernels take for granted.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

namespace ondevice {

namespace nb = nanobind;

template <class T, size_t N>
using CArray = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

void bind_layers(nb::module_& m);
void bind_flash(nb::module_& m);

}  // namespace ondevice
