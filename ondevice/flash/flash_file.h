// One file on flash: opened past the page cache where possible, read in whole pages or blocks, checked by
// CRC-32C.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace ondevice {

// Direct reads may begin, end and land on multiples of this, whatever the device's own block is.
constexpr int64_t kPage = 4096;

inline int64_t align_down(int64_t n, int64_t alignment) { return n / alignment * alignment; }
inline int64_t align_up(int64_t n, int64_t alignment) { return align_down(n + alignment - 1, alignment); }
inline int64_t page_down(int64_t n) { return align_down(n, kPage); }
inline int64_t page_up(int64_t n) { return align_up(n, kPage); }

// A read that failed, came short, or whose bytes don't match their checksum.
struct FlashError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The system has no file descriptor left for the process: nothing is wrong with the file.
struct NoDescriptor : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The file system doesn't read past its page cache (O_DIRECT refused).
struct DirectRefused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Range {
  int64_t begin = 0, end = 0;
  int64_t nbytes() const { return end - begin; }
};

// What a file must be: its size, and CRCs of the units that cover [crc_start, nbytes), lengths repeating; and
// where float16 values lie, which must be finite: ascending, from crc_start on in every `halves_period`
// bytes, or where that is 0 once, from the start of the file on.
struct FileSpec {
  std::string path;
  int64_t nbytes = 0;
  int64_t crc_start = 0;  // a multiple of kPage
  std::vector<uint64_t> units;
  std::shared_ptr<const uint32_t> crcs;  // as many as count_crc_units() says
  size_t crc_count = 0;
  std::vector<Range> halves;
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

  // The smallest range of whole checked units around `nbytes` at `offset`.
  // Throws std::out_of_range unless there are any and they lie within the checked bytes of the file.
  Range expand(int64_t offset, int64_t nbytes) const;

  // Cuts a range of whole units into pieces of about `target` bytes. Cuts fall where a unit ends on a page
  // boundary, so pieces share neither a page nor a unit and no byte is read twice.
  std::vector<Range> cut(Range range, int64_t target) const;

  // Reads `range`, widened to multiples of `alignment`, which is block() or a multiple of it, to `out`
  // (aligned likewise) and returns the bytes read. Throws FlashError.
  int64_t read(Range range, uint8_t* out, int64_t alignment) const;

  // Compares whole units with their CRCs, and looks whether the float16 values in them are finite; `bytes` is
  // the byte at range.begin. Throws FlashError.
  void check(Range range, const uint8_t* bytes) const;

  // Gives the descriptor back; nobody may be reading, or read after it. Idempotent.
  void close() { file_.close(); }

  const FileSpec& spec() const { return spec_; }
  int64_t period() const { return period_; }
  int fd() const { return file_.fd; }
  // Direct reads may begin, end and land on multiples of this here: a small record needs no whole pages.
  int64_t block() const { return block_; }

 private:
  [[noreturn]] void fail(int64_t offset, const std::string& cause) const;
  [[noreturn]] void fail_short(int64_t offset, int64_t end) const;
  [[noreturn]] void refuse_direct() const;
  void probe_direct() const;
  void check_spec() const;
  void check_crcs(Range range, const uint8_t* bytes) const;
  void check_finite(Range range, const uint8_t* bytes) const;

  FileSpec spec_;
  bool direct_;
  FileHandle file_;
  int64_t block_ = kPage;
  int64_t period_ = 0;           // the sum of the unit lengths
  int64_t grid_ = 0;             // a multiple of period_ and of kPage: where cuts may fall
  std::vector<int64_t> starts_;  // of each unit within the period
};

}  // namespace ondevice
