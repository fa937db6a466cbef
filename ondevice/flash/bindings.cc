// Python bindings of ondevice/flash. Arguments are checked here and in the constructors; the GIL is released
// wherever a call reads, waits or computes checksums.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "crc32c.h"
#include "flash_reader.h"
#include "range_reads.h"
#include "read_ahead.h"
#include "record_batch.h"

namespace nb = nanobind;

namespace ondevice {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutRows = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RecordIds = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Targets = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Crcs = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// An array over memory that lives as long as `owner`, which is any copyable or movable holder of it.
template <class Scalar, class Owner>
nb::ndarray<nb::numpy, Scalar, nb::ndim<1>> owned_array(Scalar* data, size_t size, Owner owner) {
  auto holder = std::make_unique<Owner>(std::move(owner));
  nb::capsule capsule(holder.get(), [](void* p) noexcept { delete static_cast<Owner*>(p); });
  holder.release();
  return nb::ndarray<nb::numpy, Scalar, nb::ndim<1>>(data, {size}, capsule);
}

auto crc32c_with(Bytes data, const std::vector<uint64_t>& units, Crc32cTarget target) {
  if (units.empty()) throw std::invalid_argument("crc32c needs at least one unit length");
  for (uint64_t unit : units)
    if (unit == 0 || unit > (uint64_t{1} << 40))
      throw std::invalid_argument("a unit must have 1 to 2^40 bytes");
  std::vector<uint32_t> crcs(count_crc_units(data.size(), units, 0));
  {
    nb::gil_scoped_release release;
    crc32c_units(data.data(), data.size(), units, 0, crcs.data(), target);
  }
  uint32_t* values = crcs.data();  // a move keeps the address
  const size_t count = crcs.size();
  return owned_array<uint32_t>(values, count, std::move(crcs));
}

auto crc32c(Bytes data, const std::vector<uint64_t>& units) {
  return crc32c_with(data, units, Crc32cTarget::kAuto);
}

auto crc32c_on(Bytes data, const std::vector<uint64_t>& units, const std::string& target) {
  if (target == "table") return crc32c_with(data, units, Crc32cTarget::kTable);
  if (target != "hardware") throw std::invalid_argument("target is table or hardware, not " + target);
  if (!has_crc32c_instruction()) throw std::invalid_argument("this processor has no CRC-32C instruction");
  return crc32c_with(data, units, Crc32cTarget::kHardware);
}

// Begin, end, step and count of ranges, and whether they are scales of MXFP4.
using HalvesArg = std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, bool>>;

FileSpec make_spec(nb::bytes path, int64_t nbytes, int64_t crc_start, std::vector<uint64_t> units, Crcs crcs,
                   const HalvesArg& halves, int64_t halves_period) {
  FileSpec spec;
  spec.path = std::string(path.c_str(), path.size());
  spec.nbytes = nbytes;
  spec.crc_start = crc_start;
  spec.units = std::move(units);
  spec.crcs = std::shared_ptr<const uint32_t>(crcs.data(), [crcs](const uint32_t*) {});
  spec.crc_count = crcs.size();
  for (const auto& [begin, end, step, count, mxfp4] : halves)
    spec.halves.push_back({{begin, end}, step, count, mxfp4});
  spec.halves_period = halves_period;
  return spec;
}

IoMode parse_io(const std::string& io) {
  if (io == "auto") return IoMode::kAuto;
  if (io == "direct") return IoMode::kDirect;
  if (io == "buffered") return IoMode::kBuffered;
  throw std::invalid_argument("io is auto, direct or buffered, not " + io);
}

using Times = std::tuple<uint64_t, double, double, uint64_t>;

Times times(const ReadStats& stats) {
  return {stats.bytes_read, stats.read_seconds, stats.cpu_seconds, stats.reads};
}

std::vector<Extent> make_extents(const std::vector<std::tuple<size_t, int64_t, int64_t>>& tuples) {
  std::vector<Extent> extents;
  for (const auto& [file, offset, nbytes] : tuples) extents.push_back({file, offset, nbytes});
  return extents;
}

void read_records(FlashReader& reader, size_t file, Ids ids, OutRows out) {
  if (out.shape(0) != ids.size() || static_cast<int64_t>(out.shape(1)) != reader.file(file).period())
    throw std::invalid_argument("out must have a row of " + std::to_string(reader.file(file).period()) +
                                " bytes for each of the " + std::to_string(ids.size()) + " records");
  nb::gil_scoped_release release;
  reader.read_records(file, ids.data(), ids.size(), out.data());
}

auto read_new(FlashReader& reader, size_t file, int64_t offset, int64_t nbytes) {
  MappedBuffer buffer;
  uint8_t* first = nullptr;
  {
    nb::gil_scoped_release release;
    buffer = reader.read_new(file, offset, nbytes, &first);
  }
  return owned_array<uint8_t>(first, static_cast<size_t>(nbytes), std::move(buffer));
}

auto next_extent(ReadAhead& ahead) {
  ReadAhead::View view;
  {
    nb::gil_scoped_release release;
    view = ahead.next();
  }
  const auto [data, nbytes, owner] = std::move(view);
  return owned_array<const uint8_t>(data, nbytes, owner);
}

void bind_reader(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<FileSpec>(m, "FileSpec")
      .def(
          "__init__",
          [](FileSpec* self, nb::bytes path, int64_t nbytes, int64_t crc_start, std::vector<uint64_t> units,
             Crcs crcs, const HalvesArg& halves, int64_t halves_period) {
            new (self)
                FileSpec(make_spec(path, nbytes, crc_start, std::move(units), crcs, halves, halves_period));
          },
          nb::arg("path"), nb::arg("nbytes"), nb::arg("crc_start"), nb::arg("units"),
          nb::arg("crcs").noconvert(), nb::arg("halves"), nb::arg("halves_period"));
  nb::class_<FlashReader>(m, "FlashReader")
      .def(
          "__init__",
          [](FlashReader* self, std::vector<FileSpec> specs, const std::string& io, size_t depth, bool ring) {
            IoMode mode = parse_io(io);
            new (self) FlashReader(std::move(specs), mode, depth, ring);
          },
          nb::arg("specs"), nb::arg("io"), nb::arg("depth"), nb::arg("ring"))
      .def("read_new", &read_new, nb::arg("file"), nb::arg("offset"), nb::arg("nbytes"))
      .def(
          "read",
          [](FlashReader& self, size_t file, int64_t offset, OutBytes out) {
            nb::gil_scoped_release release;
            self.read(file, offset, static_cast<int64_t>(out.size()), out.data());
          },
          nb::arg("file"), nb::arg("offset"), nb::arg("out").noconvert())
      .def("read_records", &read_records, nb::arg("file"), nb::arg("ids").noconvert(),
           nb::arg("out").noconvert())
      .def("close", &FlashReader::close, Release())
      .def(
          "stats", [](FlashReader& self) { return times(self.pool().stats()); }, Release())
      .def_prop_ro("staging_bytes", [](FlashReader& self) { return self.pool().staging_bytes(); })
      .def(
          "trim", [](FlashReader& self) { self.pool().trim(); }, Release())
      .def_prop_ro("direct", &FlashReader::direct)
      .def_prop_ro("has_ring", [](FlashReader& self) { return self.pool().has_ring(); })
      .def_prop_ro("fallback_reason", &FlashReader::fallback_reason);
}

void bind_read_ahead(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  using Extents = std::vector<std::tuple<size_t, int64_t, int64_t>>;
  nb::class_<ReadAhead>(m, "ReadAhead")
      .def(
          "__init__",
          [](ReadAhead* self, std::shared_ptr<FlashReader> reader, const Extents& extents, size_t slot_bytes,
             size_t slots, bool cyclic, std::optional<OutBytes> memory) {
            SlotMemory slots_memory;
            // The array counts its references; releasing the last one takes the GIL.
            if (memory)
              slots_memory = {std::shared_ptr<uint8_t>(memory->data(), [memory](uint8_t*) {}),
                              memory->size()};
            new (self)
                ReadAhead(std::move(reader), make_extents(extents), slot_bytes, slots, cyclic, slots_memory);
          },
          nb::arg("reader"), nb::arg("extents"), nb::arg("slot_bytes"), nb::arg("slots"), nb::arg("cyclic"),
          nb::arg("memory").noconvert().none())
      .def("next", &next_extent)
      .def("release", &ReadAhead::release, Release())
      .def("rewind", &ReadAhead::rewind, Release())
      .def(
          "reschedule",
          [](ReadAhead& self, const Extents& extents) {
            const auto schedule = make_extents(extents);
            nb::gil_scoped_release release;
            self.reschedule(schedule);
          },
          nb::arg("extents"))
      .def("close", &ReadAhead::close, Release())
      .def(
          "stats",
          [](ReadAhead& self) {
            ReadAheadStats stats = self.stats();
            return std::make_pair(times(stats.reads), stats.wait_seconds);
          },
          Release())
      .def_prop_ro("nbytes", &ReadAhead::nbytes);
}

void bind_batch(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<RecordBatch>(m, "RecordBatch")
      .def(nb::init<std::shared_ptr<FlashReader>, bool>(), nb::arg("reader"), nb::arg("urgent"))
      .def(
          "start",
          [](RecordBatch& self, size_t file, size_t first_part, size_t parts, RecordIds ids, Targets targets,
             int64_t gap_bytes) {
            if (ids.size() != targets.size()) throw std::invalid_argument("ids and targets are (n,)");
            nb::gil_scoped_release release;
            self.start(file, first_part, parts, ids.data(), ids.size(), targets.data(), gap_bytes);
          },
          nb::arg("file"), nb::arg("first_part"), nb::arg("parts"), nb::arg("ids").noconvert(),
          nb::arg("targets").noconvert(), nb::arg("gap_bytes"))
      .def("done", &RecordBatch::done, Release())
      .def("halt", &RecordBatch::halt, Release())
      .def("finish", &RecordBatch::finish, Release())
      .def("close", &RecordBatch::close, Release())
      .def("stats", [](RecordBatch& self) { return times(self.stats()); }, Release());
}

void bind_ranges(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<RangeReads>(m, "RangeReads")
      .def(nb::init<std::shared_ptr<FlashReader>>(), nb::arg("reader"))
      .def("begin", &RangeReads::begin, nb::arg("file"), nb::arg("offset"), nb::arg("nbytes"),
           nb::arg("target"), nb::arg("ahead") = false, Release())
      .def("hurry", &RangeReads::hurry, nb::arg("ticket"), Release())
      .def("drop", &RangeReads::drop, nb::arg("ticket"), Release())
      .def("arrived", &RangeReads::arrived, nb::arg("ticket"), Release())
      .def("wait", &RangeReads::wait, nb::arg("ticket"), Release())
      .def("cancel", &RangeReads::cancel, Release())
      .def("close", &RangeReads::close, Release());
}

void raise(const char* type, const char* message) {
  nb::object error = nb::module_::import_("ondevice.errors").attr(type);
  nb::object text = nb::steal(PyUnicode_DecodeFSDefault(message));
  PyErr_SetObject(error.ptr(), text.ptr());
}

}  // namespace

void bind_flash(nb::module_& m, nb::module_& testing) {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const FlashError& error) {
      raise("FlashReadError", error.what());
    } catch (const DirectRefused& error) {
      raise("BackendUnavailableError", error.what());
    } catch (const NoDescriptor& error) {
      raise("OndeviceError",
            (std::string("the system refuses a file descriptor: ") + error.what() +
             "; close other models, or raise the limit that the process runs under (ulimit -n)")
                .c_str());
    } catch (const std::system_error& error) {
      raise("OndeviceError",
            (std::string("the system refuses a thread: ") + error.what() +
             "; lower --threads or take --sparsity dense, or raise the limit that the process runs under")
                .c_str());
    }
  });
  m.def("crc32c", &crc32c, nb::arg("data").noconvert(), nb::arg("units"));
  testing.def("crc32c_on", &crc32c_on, nb::arg("data").noconvert(), nb::arg("units"), nb::arg("target"));
  bind_reader(m);
  bind_read_ahead(m);
  bind_batch(m);
  bind_ranges(m);
}

}  // namespace ondevice
