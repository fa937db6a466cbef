// A made-up file with damage and one that shrinks once it is open, for the stress programs.
#pragma once

#include <unistd.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "../../ondevice/flash/flash_reader.h"
#include "made_up_file.h"

namespace ondevice {

// Of the second file, which shrinks once it is open, this many records are left.
constexpr int64_t kLeft = 1500;

// Damage in first parts, which nobody may want, and in second parts.
inline std::vector<int64_t> wrong_units() {
  std::vector<int64_t> units;
  for (int64_t id = 40; id < kRecords; id += 97) units.push_back(2 * id + 1);
  for (int64_t id = 10; id < kRecords; id += 101) units.push_back(2 * id);
  return units;
}

struct Files {
  std::string whole, shrinking;
  MadeUpFile data;
  FileSpec shrunk;
  std::set<int64_t> wrong;
  // Whether the system has io_uring; then a reader that shall use it does.
  const bool io_uring = ReadRing::make(1) != nullptr;

  explicit Files(const std::string& stem) : whole(stem + ".bin"), shrinking(stem + "_shrinking.bin") {
    for (const int64_t unit : wrong_units()) wrong.insert(unit);
    data = make_up_file(whole, wrong_units());
    shrunk = make_up_file(shrinking, {}).spec;
  }
  ~Files() {
    unlink(whole.c_str());
    unlink(shrinking.c_str());
  }

  std::shared_ptr<FlashReader> open(IoMode io, size_t depth, bool ring) const {
    write_file(shrinking, data.bytes);
    auto reader = std::make_shared<FlashReader>(std::vector<FileSpec>{data.spec, shrunk}, io, depth, ring);
    expect(reader->pool().has_ring() == (ring && io_uring && reader->direct()),
           "a reader has no ring, or one too many");
    expect(truncate(shrinking.c_str(), kHeader + kLeft * kStride) == 0, "the file doesn't shrink");
    return reader;
  }

  bool sound(size_t file, size_t first_part, size_t parts, int64_t id) const {
    if (file == 1) return id < kLeft;
    for (size_t part = first_part; part < first_part + parts; ++part)
      if (wrong.count(2 * id + static_cast<int64_t>(part))) return false;
    return true;
  }
};

}  // namespace ondevice
