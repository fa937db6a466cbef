// A file of made-up records with checksums, some of which are wrong, for the stress programs.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../../ondevice/flash/crc32c.h"
#include "../../ondevice/flash/flash_file.h"

namespace ondevice {

constexpr int64_t kHeader = 4096, kRecords = 2000;
// Whole records lie on blocks of 512 bytes, their parts don't.
const std::vector<uint64_t> kUnits = {640, 1408};
constexpr int64_t kStride = 640 + 1408;

// Where a program of many rounds is, for what `expect` prints.
inline std::string& failure_place() {
  static std::string place;
  return place;
}

inline void expect(bool condition, const char* what) {
  if (condition) return;
  fprintf(stderr, "\n%s%s\n", failure_place().c_str(), what);
  _exit(1);
}

template <class Error, class Call>
bool throws(Call call) {
  try {
    call();
  } catch (const Error&) {
    return true;
  }
  return false;
}

struct MadeUpFile {
  std::vector<uint8_t> bytes;
  FileSpec spec;

  const uint8_t* record(int64_t id) const { return bytes.data() + kHeader + id * kStride; }
};

inline void write_file(const std::string& path, const std::vector<uint8_t>& bytes) {
  const int fd = open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
  expect(fd >= 0 && write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
         "the test file can't be written");
  close(fd);
}

// wrong_units: those of all units that differ from their checksums.
inline MadeUpFile make_up_file(const std::string& path, const std::vector<int64_t>& wrong_units) {
  MadeUpFile file;
  file.bytes.resize(kHeader + kRecords * kStride);
  std::mt19937 random(1);
  for (size_t i = kHeader; i < file.bytes.size(); ++i) file.bytes[i] = static_cast<uint8_t>(random());
  auto crcs = std::make_shared<std::vector<uint32_t>>(2 * kRecords);
  crc32c_units(file.record(0), kRecords * kStride, kUnits, 0, crcs->data());
  for (const int64_t unit : wrong_units) (*crcs)[static_cast<size_t>(unit)] ^= 1;
  write_file(path, file.bytes);
  file.spec.path = path;
  file.spec.nbytes = static_cast<int64_t>(file.bytes.size());
  file.spec.crc_start = kHeader;
  file.spec.units = kUnits;
  file.spec.crcs = std::shared_ptr<const uint32_t>(crcs, crcs->data());
  file.spec.crc_count = crcs->size();
  return file;
}

}  // namespace ondevice
