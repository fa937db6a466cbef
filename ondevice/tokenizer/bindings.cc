// Python bindings of ondevice/tokenizer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "tokenizer/byte_pairs.h"

namespace nb = nanobind;

namespace ondevice {

void bind_tokenizer(nb::module_& m) {
  nb::class_<BytePairs>(m, "BytePairs")
      .def(
          "__init__",
          [](BytePairs* table, const nb::bytes& file, const std::vector<uint32_t>& ends) {
            new (table) BytePairs({file.c_str(), file.size()}, ends);
          },
          nb::keep_alive<1, 2>(), nb::arg("file"), nb::arg("ends"))
      .def_prop_ro("size", &BytePairs::size)
      .def_prop_ro("composes", &BytePairs::composes)
      .def("added_tokens", &BytePairs::added_tokens, nb::arg("flags"))
      .def(
          "encode",
          [](const BytePairs& table, std::string_view text, bool special, bool composed) {
            std::vector<uint32_t> ids;
            {
              nb::gil_scoped_release release;
              table.encode(text, special, composed, &ids);
            }
            return ids;
          },
          nb::arg("text"), nb::arg("special"), nb::arg("composed") = false)
      .def(
          "cut",
          [](const BytePairs& table, std::string_view text, bool special) {
            nb::list stretches;
            for (const BytePairs::Stretch& it : table.cut(text, special))
              stretches.append(nb::make_tuple(it.token, nb::str(it.text.data(), it.text.size())));
            return stretches;
          },
          nb::arg("text"), nb::arg("special"))
      .def("token_bytes",
           [](const BytePairs& table, uint32_t token) {
             const std::string_view spelled = table.bytes(token);
             return nb::bytes(spelled.data(), spelled.size());
           })
      .def("is_added", &BytePairs::is_added)
      .def("added_token",
           [](const BytePairs& table, const nb::bytes& text) {
             return table.added_token({text.c_str(), text.size()});
           })
      .def("merged_token", [](const BytePairs& table, const nb::bytes& spelled) {
        return table.merged_token({spelled.c_str(), spelled.size()});
      });
}

}  // namespace ondevice
