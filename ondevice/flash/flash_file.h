// One file on flash: opened for direct reads where possible, read in whole pages or blocks, checked by
// CRC-32C.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace ondevice {

// Offsets, lengths and addresses of direct reads may be multiples of this, whatever the device's block size.
constexpr int64_t kPage = 4096;

inline int64_t align_down(int64_t n, int64_t alignment) { return n / alignment * alignment; }
inline int64_t align_up(int64_t n, int64_t alignment) { return align_down(n + alignment - 1, alignment); }
inline int64_t page_down(int64_t n) { return align_down(n, kPage); }
inline int64_t page_up(int64_t n) { return align_up(n, kPage); }

// A read that failed, came short, or whose bytes don't match their checksum.
struct FlashError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The process has no file descriptor left. Nothing is wrong with the file.
struct NoDescriptor : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The file system can't bypass its page cache: it refuses O_DIRECT.
struct DirectRefused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Range {
  int64_t begin = 0, end = 0;
  int64_t nbytes() const { return end - begin; }
};

// A range of float16 values, and count - 1 more of its length, each `step` bytes behind the one before.
// mxfp4: they are scales of MXFP4 instead, a byte each.
struct Halves {
  Range first;
  int64_t step = 0, count = 1;
  bool mxfp4 = false;
  int64_t end() const { return first.end + step * (count - 1); }
};

// What a file must contain. CRCs cover [crc_start, nbytes) unit by unit; the unit lengths repeat. `halves`
// are ascending, and finite, as are weights with their scales. They count from crc_start and repeat every
// `halves_period` bytes; if that is 0, they count from the start of the file and don't repeat.
struct FileSpec {
  std::string path;
  int64_t nbytes = 0;
  int64_t crc_start = 0;  // a multiple of kPage
  std::vector<uint64_t> units;
  std::shared_ptr<const uint32_t> crcs;  // count_crc_units() of them
  size_t crc_count = 0;
  std::vector<Halves> halves;
  int64_t halves_period = 0;
};

class FileHandle {
 public:
  FileHandle() = default;
  ~FileHandle();
  FileHandle(const FileHandle&) = delete;
  FileHandle& operator=(const FileHandle&) = delete;
  // Idempotent.
  void close();
  int fd = -1;
};

class FlashFile {
 public:
  // Throws std::invalid_argument for a wrong spec, DirectRefused, NoDescriptor, and FlashError if the file
  // can't be opened or its size isn't the expected one.
  FlashFile(FileSpec spec, bool direct);

  // The smallest range of whole checked units around `nbytes` at `offset`. Throws std::out_of_range if nbytes
  // isn't positive or the bytes aren't all among the checked ones.
  Range expand(int64_t offset, int64_t nbytes) const;

  // Cuts a range of whole units into pieces of about `target` bytes. Cuts fall where a unit ends on a page
  // boundary, so pieces share neither a page nor a unit and no byte is read twice. Where all units are whole
  // pages, a piece has more than `target` bytes only if it is one unit.
  std::vector<Range> cut(Range range, int64_t target) const;

  // Reads `range`, widened to multiples of `alignment`, which is block() or a multiple of it, to `out`
  // (aligned likewise) and returns the bytes read. Throws FlashError.
  int64_t read(Range range, uint8_t* out, int64_t alignment) const;

  // Compares whole units with their CRCs, and checks that the float16 values in them are finite. `bytes` is
  // the address of the byte at range.begin. Throws FlashError.
  void check(Range range, const uint8_t* bytes) const;

  // Closes the descriptor. No read may be under way or follow. Idempotent.
  void close() { file_.close(); }

  const FileSpec& spec() const { return spec_; }
  int64_t period() const { return period_; }
  int fd() const { return file_.fd; }
  // What direct reads of this file are aligned to. Where it is less than a page, small records need no whole
  // pages.
  int64_t block() const { return block_; }

 private:
  [[noreturn]] void fail(int64_t offset, const std::string& cause) const;
  [[noreturn]] void fail_short(int64_t offset, int64_t end) const;
  [[noreturn]] void refuse_direct() const;
  void probe_direct() const;
  void check_spec() const;
  void check_crcs(Range range, const uint8_t* bytes) const;
  void check_finite(Range range, const uint8_t* bytes) const;
  void check_finite(const Halves& halves, int64_t base, Range range, const uint8_t* bytes) const;

  FileSpec spec_;
  bool direct_;
  FileHandle file_;
  int64_t block_ = kPage;
  int64_t period_ = 0;           // the sum of the unit lengths
  int64_t grid_ = 0;             // a multiple of period_ and of kPage: pieces are cut at its multiples
  std::vector<int64_t> starts_;  // of each unit within the period
  bool whole_pages_ = true;      // whether all units are
};

}  // namespace ondevice
