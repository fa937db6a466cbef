#include "bindings.h"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "dispatch.h"

namespace ondevice {
namespace {

// Seconds of `rounds` products of a 4-bit matrix with tokens on every thread, from the caches of its core.
double seconds_in_cache(Runner& runner, int64_t rows, int64_t cols, int64_t tokens, int64_t rounds) {
  const RowFormat format(4);
  const std::vector<float> x(static_cast<size_t>(tokens * cols), 1.0f);
  const InputRows inputs = runner.prepare(x.data(), cols, tokens, cols, format);
  const int64_t tiles = (rows + kTile - 1) / kTile, threads = runner.pool().threads();
  MappedBuffer weights(static_cast<size_t>(tiles * kTile * format.row_bytes(groups_of(cols))));
  std::vector<float> out(static_cast<size_t>(threads * tokens * rows));
  const auto begun = std::chrono::steady_clock::now();
  runner.pool().parallel_for(threads, 1, [&](int64_t part, int64_t, int) {
    for (int64_t round = 0; round < rounds; ++round)
      runner.kernels().linear_quantized(format, weights.data(), inputs.quantized, tokens, nullptr, nullptr,
                                        out.data() + part * tokens * rows, rows, rows, 0, tiles);
  });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

void bind_vector_ops(nb::module_& m) {
  m.def(
      "norm",
      [](Runner& runner, const CArray<const float, 2>& x, const NormArg& norm, const CArray<float, 2>& out) {
        const int64_t rows = x.shape(0), n = x.shape(1);
        require(out.shape(0) == x.shape(0) && out.shape(1) == x.shape(1), "x and out are (T, n)");
        const Norm of = norm_of(norm, n);
        require(of.weight != nullptr, "a norm has a weight");
        const NativeCall call(runner);
        runner.pool().parallel_for(rows, 16, [&](int64_t begin, int64_t end, int) {
          for (int64_t t = begin; t < end; ++t)
            runner.kernels().norm(x.data() + t * n, of, n, out.data() + t * n);
        });
      },
      nb::arg("runner"), nb::arg("x"), nb::arg("norm"), nb::arg("out"));
  m.def(
      "add_normed",
      [](Runner& runner, const CArray<float, 2>& x, const CArray<const float, 2>& y, const NormArg& norm) {
        const int64_t tokens = x.shape(0), n = x.shape(1);
        require(y.shape(0) == x.shape(0) && y.shape(1) == x.shape(1), "x and y are (T, n)");
        const Norm of = norm_of(norm, n);
        require(of.weight != nullptr, "a norm has a weight");
        const NativeCall call(runner);
        runner.add_normed(x.data(), y.data(), tokens, n, of);
      },
      nb::arg("runner"), nb::arg("x"), nb::arg("y"), nb::arg("norm"));
  m.def("soft_cap", [](Runner& runner, const CArray<float, 2>& x, float cap) {
    require(cap > 0.0f, "cap must be positive");
    const int64_t rows = x.shape(0), n = x.shape(1);
    const NativeCall call(runner);
    for (int64_t t = 0; t < rows; ++t)
      runner.pool().parallel_for((n + 15) / 16, 256, [&](int64_t begin, int64_t end, int) {
        const int64_t last = 16 * end < n ? 16 * end : n;
        runner.kernels().soft_cap(x.data() + t * n + 16 * begin, cap, last - 16 * begin);
      });
  });
  m.def("copy_out",
        [](const CArray<const uint64_t, 1>& addresses, size_t offset, const CArray<uint8_t, 2>& out) {
          require(addresses.shape(0) == out.shape(0), "addresses are (n,), out is (n, bytes)");
          nb::gil_scoped_release release;
          for (size_t i = 0; i < out.shape(0); ++i)
            std::memcpy(out.data() + i * out.shape(1),
                        reinterpret_cast<const uint8_t*>(addresses.data()[i]) + offset, out.shape(1));
        });
  m.def(
      "largest",
      [](const CArray<const float, 1>& x, const CArray<int32_t, 1>& ids, const CArray<float, 1>& values) {
        const int64_t n = x.shape(0), count = ids.shape(0);
        require(count >= 1 && count <= n && static_cast<int64_t>(values.shape(0)) == count,
                "ids and values are (K,), 1 <= K <= n");
        static std::string name;
        static const KernelTable* kernels = find_target("auto", &name);
        nb::gil_scoped_release release;
        kernels->largest(x.data(), n, count, ids.data(), values.data());
        return kernels->sum_of_exps(x.data(), n, values.data()[0]);
      },
      nb::arg("x"), nb::arg("ids"), nb::arg("values"));
  m.def(
      "all_finite",
      [](const CArray<const float, 2>& x) {
        // The exponent of a value that isn't finite has all bits, so that one more sets the topmost.
        const float* values = x.data();
        const size_t n = x.size();
        uint32_t carries = 0;
        for (size_t i = 0; i < n; ++i) {
          uint32_t bits;
          std::memcpy(&bits, values + i, sizeof bits);
          carries |= (bits & 0x7f800000) + 0x00800000;
        }
        return (carries & 0x80000000) == 0;
      },
      nb::arg("x"));
  m.def(
      "activate",
      [](Runner& runner, const FormArg& form, const CArray<const float, 1>& gate, const Weight& up,
         const CArray<float, 1>& out) {
        require((!up || gate.shape(0) == up->shape(0)) && gate.shape(0) == out.shape(0),
                "gate, up and out have one length");
        runner.kernels().activate(form_of(form), gate.data(), up ? up->data() : nullptr, out.data(),
                                  static_cast<int64_t>(gate.shape(0)));
      },
      nb::arg("runner"), nb::arg("form"), nb::arg("gate"), nb::arg("up").none(), nb::arg("out"));
  m.def(
      "seconds_in_cache",
      [](Runner& runner, int64_t rows, int64_t cols, int64_t tokens, int64_t rounds) {
        require(rows > 0 && cols > 0 && tokens > 0 && rounds > 0, "sizes must be positive");
        const NativeCall call(runner);
        return seconds_in_cache(runner, rows, cols, tokens, rounds);
      },
      nb::arg("runner"), nb::arg("rows"), nb::arg("cols"), nb::arg("tokens"), nb::arg("rounds"));
}

}  // namespace
}  // namespace ondevice

NB_MODULE(_native, m) {
  using namespace ondevice;
  // A program may end while one of its threads still holds a model. Its users need no warning of that.
  nb::set_leak_warnings(false);
  m.def("available_targets", &available_targets);
  m.attr("POPULATED_BYTES") = kPopulatedBytes;
  m.def(
      "allocate",
      [](size_t nbytes, bool populated) {
        auto buffer = std::make_unique<MappedBuffer>();
        {
          nb::gil_scoped_release release;
          *buffer = MappedBuffer(nbytes, populated);
        }
        nb::capsule owner(buffer.get(), [](void* held) noexcept { delete static_cast<MappedBuffer*>(held); });
        uint8_t* data = buffer.release()->data();
        return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {nbytes}, owner);
      },
      nb::arg("nbytes"), nb::arg("populated") = false);
  nb::class_<Runner>(m, "Runner")
      .def(nb::init<int, const std::string&>(), nb::arg("threads"), nb::arg("target") = "auto")
      .def_prop_ro("target", &Runner::target)
      .def("trim", &Runner::trim)
      .def("time_steps", &Runner::time_steps, nb::arg("counts"))
      .def("step_times",
           [](Runner& runner) {
             require(runner.times() != nullptr, "the runner doesn't count the time of steps");
             std::vector<std::tuple<std::string, double, int64_t, int64_t>> times;
             for (const StepTimes::Total& it : runner.times()->totals())
               times.emplace_back(kStepNames[times.size()], it.seconds, it.macs, it.bytes);
             return times;
           })
      .def("name_products", [](Runner& runner, const std::string& name) {
        const auto step = std::find(kStepNames.begin(), kStepNames.end(), name);
        require(step != kStepNames.end(), "no step has this name");
        runner.name_products(static_cast<Step>(step - kStepNames.begin()));
      });
  nb::module_ testing = m.def_submodule("testing", "For tests only.");
  bind_vector_ops(m);
  bind_attention(m);
  bind_delta(m);
  bind_layer(m);
  bind_mamba2(m);
  bind_matrix(m);
  bind_gguf(m);
  bind_expert(m);
  bind_feed_forward(m);
  bind_flash(m, testing);
  bind_tokenizer(m);
  bind_testing(testing);
}
