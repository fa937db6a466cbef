// Random files, specifications and requests for the flash reader, made to be run under sanitizers: right
// bytes or a typed error, whatever is asked of it and whatever became of the file.
//
//   flash_fuzz FOLDER [SECONDS] [SEED]
//
// Exits 1 with the round at the first wrong byte, missing error, or error of another type.
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../../ondevice/flash/flash_reader.h"
#include "../../ondevice/flash/read_ahead.h"
#include "../../ondevice/flash/record_batch.h"
#include "made_up_file.h"

using namespace ondevice;

namespace {

using Random = std::mt19937_64;

template <class T>
T one_of(Random& random, std::initializer_list<T> values) {
  return *(values.begin() + random() % values.size());
}

int64_t below(Random& random, int64_t limit) {
  return limit <= 0 ? 0 : static_cast<int64_t>(random() % limit);
}

// A number near a boundary, or anywhere.
int64_t odd_number(Random& random, int64_t size) {
  constexpr int64_t least = std::numeric_limits<int64_t>::min(), most = std::numeric_limits<int64_t>::max();
  if (random() % 6 == 0)
    return one_of<int64_t>(random,
                           {-1, 0, 1, size - 1, size, size + 1, 1 << 31, int64_t{1} << 40, least, most});
  return below(random, size + 1);
}

enum class Result { kDone, kRefused, kDamaged };

// What a call ends with; errors of other types end the program.
template <class Call>
Result outcome(Call call) {
  try {
    call();
  } catch (const FlashError&) {
    return Result::kDamaged;
  } catch (const std::invalid_argument&) {
    return Result::kRefused;
  } catch (const std::out_of_range&) {
    return Result::kRefused;
  } catch (const DirectRefused&) {
    return Result::kRefused;
  }
  return Result::kDone;
}

// A file of whole units, perhaps with a short last one, with what is checked and what isn't.
struct File {
  std::vector<uint8_t> bytes;
  std::vector<bool> sound;  // by byte: whether the file still has what the checksums were taken of
  FileSpec spec;
  bool changed = false;

  File(const std::string& path, Random& random) {
    const size_t kinds = 1 + random() % 3;
    for (size_t i = 0; i < kinds; ++i)
      spec.units.push_back(one_of<uint64_t>(random, {1, 64, 511, 512, 640, 1408, 4096, 5000, 1 << 15}));
    spec.crc_start = kPage * below(random, 3);
    spec.nbytes = spec.crc_start + below(random, one_of<int64_t>(random, {2, 4097, 200000}));
    bytes.resize(static_cast<size_t>(spec.nbytes));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    sound.assign(bytes.size(), true);
    const size_t covered = bytes.size() - static_cast<size_t>(spec.crc_start);
    auto crcs = std::make_shared<std::vector<uint32_t>>(count_crc_units(covered, spec.units, 0) + 1);
    crc32c_units(bytes.data() + spec.crc_start, covered, spec.units, 0, crcs->data());
    spec.crc_count = crcs->size() - 1;
    spec.crcs = std::shared_ptr<const uint32_t>(crcs, crcs->data());
    spec.path = path;
    if (!bytes.empty() && random() % 4 == 0) flip(random);
    write_file(path, bytes);
  }

  // Some bytes differ from their checksums. Where a byte is changed twice, it may be what it was.
  void flip(Random& random) {
    changed = true;
    const std::vector<uint8_t> original = bytes;
    for (size_t i = 0, n = 1 + random() % 3; i < n; ++i) {
      const size_t at = random() % bytes.size();
      bytes[at] ^= static_cast<uint8_t>(1 + random() % 255);
      sound[at] = bytes[at] == original[at];
    }
  }

  // A specification that doesn't fit the file, or any.
  void spoil(Random& random) {
    const int64_t odd = odd_number(random, spec.nbytes);
    switch (random() % 6) {
      case 0:
        spec.nbytes = odd;
        break;
      case 1:
        spec.crc_start = odd;
        break;
      case 2:
        spec.units.clear();
        break;
      case 3:
        spec.units.push_back(one_of<uint64_t>(random, {0, 1, uint64_t{1} << 41, ~uint64_t{0}}));
        break;
      case 4:
        spec.units.assign(65, 8);
        break;
      default:
        spec.crc_count += 1;
    }
  }

  bool all_sound(int64_t offset, int64_t nbytes) const {
    const auto first = sound.begin() + offset;
    return std::find(first, first + nbytes, false) == first + nbytes;
  }
};

constexpr uint8_t kUntouched = 0xEE;

void expect_bytes(const File& file, int64_t offset, int64_t nbytes, const uint8_t* got) {
  expect(memcmp(got, file.bytes.data() + offset, static_cast<size_t>(nbytes)) == 0, "wrong bytes");
  expect(file.all_sound(offset, nbytes), "damage went unnoticed");
}

void read_range(FlashReader& reader, const File& file, Random& random, bool shrunk) {
  const int64_t size = file.spec.nbytes, offset = odd_number(random, size), nbytes = odd_number(random, size);
  // Unsigned, so that their sum may be anything.
  const bool inside =
      offset >= file.spec.crc_start && nbytes > 0 && offset <= size && nbytes <= size - offset;
  const size_t room = inside ? static_cast<size_t>(nbytes) : 0;
  std::vector<uint8_t> out(room + 16, kUntouched);
  const Result read = outcome([&] { reader.read(0, offset, nbytes, out.data()); });
  for (size_t i = room; i < out.size(); ++i) expect(out[i] == kUntouched, "a read wrote past its end");
  expect((read == Result::kRefused) == !inside, "a range outside was read, or one inside refused");
  if (read == Result::kDone) expect_bytes(file, offset, nbytes, out.data());
  if (inside && !file.changed && !shrunk) expect(read == Result::kDone, "sound bytes weren't read");
  uint8_t* first = nullptr;
  MappedBuffer buffer;
  if (outcome([&] { buffer = reader.read_new(0, offset, nbytes, &first); }) == Result::kDone)
    expect_bytes(file, offset, nbytes, first);
}

int64_t period_of(const File& file) {
  int64_t period = 0;
  for (const uint64_t unit : file.spec.units) period += static_cast<int64_t>(unit);
  return period;
}

void read_records(FlashReader& reader, const File& file, Random& random) {
  const int64_t period = period_of(file), records = (file.spec.nbytes - file.spec.crc_start) / period;
  std::vector<int64_t> ids(random() % 8);
  for (int64_t& id : ids) id = odd_number(random, records);
  std::vector<uint8_t> out(ids.size() * static_cast<size_t>(period) + 1);
  if (outcome([&] { reader.read_records(0, ids.data(), ids.size(), out.data()); }) != Result::kDone) return;
  for (size_t i = 0; i < ids.size(); ++i) {
    expect(ids[i] >= 0 && ids[i] < records, "a record that isn't there was read");
    expect_bytes(file, file.spec.crc_start + ids[i] * period, period, out.data() + i * period);
  }
}

void read_batch(const std::shared_ptr<FlashReader>& reader, const File& file, Random& random) {
  const std::vector<uint64_t>& units = file.spec.units;
  const int64_t period = period_of(file), records = (file.spec.nbytes - file.spec.crc_start) / period;
  const size_t first_part = random() % (units.size() + 1), parts = random() % (units.size() + 2);
  std::vector<int32_t> ids;
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  for (int64_t id = std::clamp(odd_number(random, records), -most, most - 60); ids.size() < 20;
       id += 1 + below(random, 3)) {
    if (id >= records && random() % 4) break;
    ids.push_back(static_cast<int32_t>(id));
  }
  if (random() % 8 == 0) std::reverse(ids.begin(), ids.end());
  std::vector<uint8_t> rows(ids.size() * static_cast<size_t>(period) + 1);
  std::vector<uint64_t> targets;
  for (size_t i = 0; i < ids.size(); ++i)
    targets.push_back(reinterpret_cast<uint64_t>(rows.data() + i * static_cast<size_t>(period)));
  RecordBatch batch(reader, random() % 2);
  const int64_t gap = below(random, 10000);
  const bool halted = random() % 8 == 0;
  const Result read = outcome([&] {
    batch.start(0, first_part, parts, ids.data(), ids.size(), targets.data(), gap);
    if (halted)
      batch.halt();
    else
      batch.finish();
  });
  if (read != Result::kDone || halted) return;
  int64_t begin = file.spec.crc_start, nbytes = 0;
  for (size_t part = 0; part < first_part + parts; ++part)
    (part < first_part ? begin : nbytes) += static_cast<int64_t>(units[part]);
  for (size_t i = 0; i < ids.size(); ++i)
    expect_bytes(file, begin + ids[i] * period, nbytes, rows.data() + i * static_cast<size_t>(period));
}

void stream(const std::shared_ptr<FlashReader>& reader, const File& file, Random& random) {
  const int64_t size = file.spec.nbytes;
  std::vector<Extent> extents;
  for (size_t i = 0, n = random() % 5; i < n; ++i)
    extents.push_back({random() % 16 == 0, odd_number(random, size), odd_number(random, size)});
  const size_t slot_bytes = static_cast<size_t>(kPage * one_of<int64_t>(random, {0, 1, 20, 70}));
  outcome([&] {
    ReadAhead stream(reader, extents, slot_bytes, random() % 4, random() % 2);
    for (size_t step = 0; step < 12; ++step) {
      const size_t at = step % extents.size();
      const Result next = outcome([&] {
        const ReadAhead::View view = stream.next();
        expect(static_cast<int64_t>(view.nbytes) == extents[at].nbytes, "an extent of another size");
        expect_bytes(file, extents[at].offset, extents[at].nbytes, view.data);
        stream.release();
      });
      if (next == Result::kRefused) return;
    }
  });
}

void round(const std::string& path, Random& random) {
  File file(path, random);
  const bool spoilt = random() % 8 == 0;
  if (spoilt) file.spoil(random);
  const IoMode io = one_of(random, {IoMode::kAuto, IoMode::kDirect, IoMode::kBuffered});
  std::shared_ptr<FlashReader> reader;
  const Result opened = outcome([&] {
    reader =
        std::make_shared<FlashReader>(std::vector<FileSpec>{file.spec}, io, 1 + random() % 3, random() % 2);
  });
  if (opened != Result::kDone) return;
  if (spoilt) return;
  // The file shrinks under the reader's hands, or grows.
  const bool shrunk = random() % 6 == 0;
  if (shrunk) expect(truncate(path.c_str(), below(random, file.spec.nbytes + 4096)) == 0, "no truncation");
  for (size_t i = 0; i < 6; ++i) {
    read_range(*reader, file, random, shrunk);
    read_records(*reader, file, random);
    read_batch(reader, file, random);
    stream(reader, file, random);
  }
  if (random() % 4 == 0) {
    reader->close();
    uint8_t byte = 0;
    expect(outcome([&] { reader->read(0, file.spec.crc_start, 1, &byte); }) != Result::kDone,
           "read after close");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string path = std::string(argc > 1 ? argv[1] : ".") + "/flash_fuzz.bin";
  const double seconds = argc > 2 ? atof(argv[2]) : 5;
  const unsigned long seed = argc > 3 ? strtoul(argv[3], nullptr, 10) : 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  size_t rounds = 0;
  for (; std::chrono::steady_clock::now() < end; ++rounds) {
    Random random(seed * 1000003 + rounds);
    fprintf(stderr, "%s", rounds % 1000 == 0 ? "." : "");
    failure_place() = "round " + std::to_string(rounds) + " of seed " + std::to_string(seed) + ": ";
    round(path, random);
  }
  unlink(path.c_str());
  printf("\nflash_fuzz: %zu rounds of seed %lu\n", rounds, seed);
  return 0;
}
