#include "flash_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>

#include "../kernels/mapped_buffer.h"
#include "crc32c.h"

namespace ondevice {

FileHandle::~FileHandle() { close(); }

void FileHandle::close() {
  if (fd >= 0) ::close(fd);
  fd = -1;
}

namespace {

constexpr size_t kMaxUnitKinds = 64;
// A read that keeps coming back short without passing a boundary is given up after this many tries.
constexpr int kMaxShortReads = 64;

int open_file(const std::string& path, bool direct) {
  int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;  // opening a pipe must not block
#if defined(O_DIRECT)
  if (direct) flags |= O_DIRECT;
#endif
  int fd;
  do fd = open(path.c_str(), flags);
  while (fd < 0 && errno == EINTR);
#if defined(F_NOCACHE)
  if (fd >= 0 && direct && fcntl(fd, F_NOCACHE, 1) != 0) {
    close(fd);
    errno = EINVAL;
    return -1;
  }
#endif
  return fd;
}

ssize_t read_once(int fd, uint8_t* out, int64_t nbytes, int64_t offset) {
  ssize_t got;
  do got = pread(fd, out, static_cast<size_t>(nbytes), static_cast<off_t>(offset));
  while (got < 0 && errno == EINTR);
  return got;
}

// What direct reads of the file may be aligned to. Less than a page only if the system says so and a trial
// read succeeds.
int64_t direct_block([[maybe_unused]] int fd) {
#if defined(STATX_DIOALIGN)
  struct statx status;
  if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 && (status.stx_mask & STATX_DIOALIGN)) {
    const int64_t block = std::max(status.stx_dio_offset_align, status.stx_dio_mem_align);
    if (block <= 0 || kPage % block != 0) return kPage;
    MappedBuffer page(kPage);
    if (read_once(fd, page.data() + (kPage - block), block, kPage - block) >= 0) return block;
  }
#endif
  return kPage;
}

// Whether a float16 among `nbytes` bytes is infinite or NaN: all bits of its exponent are set.
bool has_broken_half(const uint8_t* bytes, int64_t nbytes) {
  constexpr uint64_t kExponents = 0x7c007c007c007c00, kOnes = 0x0400040004000400, kTops = 0x8000800080008000;
  uint64_t found = 0;
  int64_t i = 0;
  for (; i + 8 <= nbytes; i += 8) {
    uint64_t four;
    memcpy(&four, bytes + i, 8);
    found |= ((four & kExponents) + kOnes) & kTops;
  }
  for (; i < nbytes; i += 2) {
    uint16_t one;
    memcpy(&one, bytes + i, 2);
    found |= (one & 0x7c00u) == 0x7c00u;
  }
  return found != 0;
}

// Whether a scale of MXFP4 is so large that its weights may be infinite. With 252, the largest is 6 * 2^125.
bool has_large_power(const uint8_t* bytes, int64_t nbytes) {
  constexpr uint8_t kLargest = 252;
  bool found = false;
  for (int64_t i = 0; i < nbytes; ++i) found |= bytes[i] > kLargest;
  return found;
}

}  // namespace

FlashFile::FlashFile(FileSpec spec, bool direct) : spec_(std::move(spec)), direct_(direct) {
  if (spec_.units.empty() || spec_.units.size() > kMaxUnitKinds || spec_.crc_start < 0 ||
      spec_.crc_start % kPage || spec_.nbytes < spec_.crc_start)
    throw std::invalid_argument(spec_.path + ": checked units must start on a page inside the file");
  for (uint64_t unit : spec_.units) {
    if (unit == 0 || unit > (uint64_t{1} << 40))
      throw std::invalid_argument(spec_.path + ": a checked unit of " + std::to_string(unit) + " bytes");
    starts_.push_back(period_);
    period_ += static_cast<int64_t>(unit);
    whole_pages_ = whole_pages_ && unit % kPage == 0;
  }
  grid_ = std::lcm(period_, kPage);
  size_t covered = static_cast<size_t>(spec_.nbytes - spec_.crc_start);
  size_t expected = count_crc_units(covered, spec_.units, 0);
  if (spec_.crc_count != expected)
    throw std::invalid_argument(spec_.path + ": " + std::to_string(spec_.crc_count) + " checksums for " +
                                std::to_string(expected) + " units");
  check_spec();
  file_.fd = open_file(spec_.path, direct);
  if (file_.fd < 0 && direct && errno == EINVAL) refuse_direct();
  if (file_.fd < 0 && (errno == EMFILE || errno == ENFILE))
    throw NoDescriptor(spec_.path + ": " + strerror(errno));
  struct stat status;
  if (file_.fd < 0 || fstat(file_.fd, &status) != 0) fail(0, strerror(errno));
  if (!S_ISREG(status.st_mode)) fail(0, "not a regular file");
  if (status.st_size != spec_.nbytes)
    fail(0, "the file has " + std::to_string(status.st_size) + " bytes instead of " +
                std::to_string(spec_.nbytes));
  if (direct_) {
    probe_direct();
    block_ = direct_block(file_.fd);
  }
#if defined(POSIX_FADV_RANDOM)
  // We read ahead ourselves; the kernel would fill the page cache with more than was asked for.
  if (!direct_) posix_fadvise(file_.fd, 0, 0, POSIX_FADV_RANDOM);
#endif
}

void FlashFile::check_spec() const {
  int64_t last = spec_.halves_period == 0 ? spec_.crc_start : 0;
  const int64_t most = spec_.halves_period == 0 ? spec_.nbytes : spec_.halves_period;
  bool good = spec_.halves_period >= 0 && spec_.halves_period % 2 == 0;
  for (const Halves& halves : spec_.halves) {
    const Range& range = halves.first;
    good =
        good && last <= range.begin && range.begin < range.end && range.begin % 2 == 0 && range.end % 2 == 0;
    // A product of both is taken only where it can't overflow.
    good = good && halves.count >= 1 && halves.count <= most && halves.step >= 0 && halves.step <= most &&
           halves.step % 2 == 0 && (halves.count == 1 || halves.step >= range.nbytes()) &&
           halves.step <= most / halves.count;
    if (!good) break;
    last = halves.end();
  }
  for (uint64_t unit : spec_.units) good = good && (spec_.halves.empty() || unit % 2 == 0);
  if (!good || (!spec_.halves.empty() && last > most))
    throw std::invalid_argument(spec_.path +
                                ": float16 values must ascend at even bytes of the checked ones");
}

void FlashFile::refuse_direct() const {
  throw DirectRefused(spec_.path + ": the file system refuses direct reads (--io buffered works)");
}

void FlashFile::fail(int64_t offset, const std::string& cause) const {
  throw FlashError(spec_.path + ": read at byte " + std::to_string(offset) + " failed: " + cause);
}

void FlashFile::fail_short(int64_t offset, int64_t end) const {
  struct stat status;
  if (fstat(file_.fd, &status) == 0 && status.st_size < end)
    fail(offset, "the file has shrunk to " + std::to_string(status.st_size) + " bytes while open");
  fail(offset, "reads keep coming back short");
}

// Some file systems accept O_DIRECT when opening and refuse it when reading.
void FlashFile::probe_direct() const {
  if (spec_.nbytes == 0) return;
  MappedBuffer page(kPage);
  if (read_once(file_.fd, page.data(), kPage, 0) < 0 && (errno == EINVAL || errno == EOPNOTSUPP))
    refuse_direct();
}

Range FlashFile::expand(int64_t offset, int64_t nbytes) const {
  if (nbytes <= 0 || offset < spec_.crc_start || offset > spec_.nbytes || nbytes > spec_.nbytes - offset)
    throw std::out_of_range(spec_.path + ": " + std::to_string(nbytes) + " bytes at " +
                            std::to_string(offset) + " lie outside the checked bytes " +
                            std::to_string(spec_.crc_start) + " to " + std::to_string(spec_.nbytes));
  int64_t last = offset + nbytes - 1 - spec_.crc_start;
  int64_t first = offset - spec_.crc_start;
  auto unit_at = [&](int64_t position) {
    return static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), position % period_) -
                               starts_.begin() - 1);
  };
  size_t last_unit = unit_at(last);
  int64_t begin = first / period_ * period_ + starts_[unit_at(first)];
  int64_t end = last / period_ * period_ + starts_[last_unit] + static_cast<int64_t>(spec_.units[last_unit]);
  return {spec_.crc_start + begin, std::min(spec_.crc_start + end, spec_.nbytes)};
}

std::vector<Range> FlashFile::cut(Range range, int64_t target) const {
  std::vector<Range> pieces;
  if (whole_pages_) {
    for (int64_t begin = range.begin, end = begin; end < range.end;) {
      const int64_t next = expand(end, 1).end;
      if (end > begin && next - begin > target) {
        pieces.push_back({begin, end});
        begin = end;
      }
      end = next;
      if (end == range.end) pieces.push_back({begin, end});
    }
    return pieces;
  }
  int64_t step = std::max<int64_t>(target / grid_, 1) * grid_;
  int64_t from_start = range.begin - spec_.crc_start;
  int64_t first_grid = spec_.crc_start + (from_start + grid_ - 1) / grid_ * grid_;
  int64_t begin = range.begin;
  for (int64_t next = first_grid + step; next < range.end; next += step) {
    pieces.push_back({begin, next});
    begin = next;
  }
  pieces.push_back({begin, range.end});
  return pieces;
}

int64_t FlashFile::read(Range range, uint8_t* out, int64_t alignment) const {
  int64_t begin = align_down(range.begin, alignment), end = align_up(range.end, alignment);
  int64_t position = begin, total = 0;
  for (int stalls = 0; position < range.end;) {
    ssize_t got = read_once(file_.fd, out + (position - begin), end - position, position);
    if (got < 0) fail(position, strerror(errno));
    if (got == 0) fail_short(position, range.end);
    total += got;
    int64_t reached = position + got;
    if (reached >= range.end) break;
    // A direct read can only continue from an aligned offset.
    int64_t next = direct_ ? align_down(reached, alignment) : reached;
    stalls = next > position ? 0 : stalls + 1;
    if (stalls > kMaxShortReads) fail_short(position, range.end);
    position = next;
  }
#if defined(POSIX_FADV_DONTNEED)
  if (!direct_) posix_fadvise(file_.fd, begin, end - begin, POSIX_FADV_DONTNEED);
#endif
  return total;
}

void FlashFile::check(Range range, const uint8_t* bytes) const {
  check_crcs(range, bytes);
  check_finite(range, bytes);
}

void FlashFile::check_finite(Range range, const uint8_t* bytes) const {
  if (spec_.halves.empty()) return;
  const int64_t period = spec_.halves_period;
  // Each repetition of the ranges, or a single one where they don't repeat.
  int64_t base = 0;
  if (period > 0) base = spec_.crc_start + align_down(range.begin - spec_.crc_start, period);
  do {
    auto next = std::upper_bound(spec_.halves.begin(), spec_.halves.end(), range.begin - base,
                                 [](int64_t offset, const Halves& halves) { return offset < halves.end(); });
    for (; next != spec_.halves.end() && base + next->first.begin < range.end; ++next)
      check_finite(*next, base, range, bytes);
    base += period;
  } while (period > 0 && base < range.end);
}

// Those of `halves`, which count from `base`, that lie in the range.
void FlashFile::check_finite(const Halves& halves, int64_t base, Range range, const uint8_t* bytes) const {
  const Range first{base + halves.first.begin, base + halves.first.end};
  const int64_t skipped =
      halves.count > 1 && range.begin >= first.end ? (range.begin - first.end) / halves.step + 1 : 0;
  for (int64_t i = skipped; i < halves.count; ++i) {
    const int64_t begin = std::max(range.begin, first.begin + i * halves.step);
    const int64_t end = std::min(range.end, first.end + i * halves.step);
    if (first.begin + i * halves.step >= range.end) return;
    const uint8_t* at = bytes + (begin - range.begin);
    if (halves.mxfp4 ? has_large_power(at, end - begin) : has_broken_half(at, end - begin))
      throw FlashError(spec_.path + ": the bytes from " + std::to_string(begin) +
                       " hold scales or weights that are not finite; the file is damaged (ondevice verify "
                       "checks all of it)");
  }
}

void FlashFile::check_crcs(Range range, const uint8_t* bytes) const {
  constexpr int64_t kBatch = 3 * kMaxUnitKinds;
  uint32_t crcs[kBatch];
  const int64_t kinds = static_cast<int64_t>(spec_.units.size());
  const int64_t periods =
      kBatch / kinds / 3 * 3;  // whole groups of three, since crc32c_units computes three at a time
  for (int64_t begin = range.begin; begin < range.end;) {
    int64_t end = std::min(range.end, begin + periods * period_);
    int64_t position = begin - spec_.crc_start;
    size_t phase = static_cast<size_t>(std::lower_bound(starts_.begin(), starts_.end(), position % period_) -
                                       starts_.begin());
    size_t first = static_cast<size_t>(position / period_ * kinds) + phase;
    size_t nbytes = static_cast<size_t>(end - begin);
    crc32c_units(bytes + (begin - range.begin), nbytes, spec_.units, phase, crcs);
    int64_t unit_begin = begin;
    for (size_t i = 0; unit_begin < end; ++i) {
      if (crcs[i] != spec_.crcs.get()[first + i])
        throw FlashError(
            spec_.path + ": the bytes from " + std::to_string(unit_begin) +
            " don't match their checksum; the file is damaged (ondevice verify checks all of it)");
      unit_begin += static_cast<int64_t>(spec_.units[(phase + i) % spec_.units.size()]);
    }
    begin = end;
  }
}

}  // namespace ondevice
