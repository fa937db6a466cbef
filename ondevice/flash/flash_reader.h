// Reads on demand: ranges and records of a set of files, checked, in parallel, complete on return.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../kernels/own_process.h"
#include "flash_file.h"
#include "read_pool.h"

namespace ondevice {

// A piece, and what of a staged one is copied where.
struct WantedPiece {
  Piece piece;
  Range wanted;  // inside the piece's range
  uint8_t* copy_to;
};

enum class IoMode { kAuto, kDirect, kBuffered };

class FlashReader {
 public:
  // Opens every file, for `depth` reads at once: by as many threads, or with `ring`, for direct reads and
  // where the system has it, by one through io_uring. kAuto falls back to buffered for all files when one of
  // them refuses direct reads. Throws what FlashFile does, and std::invalid_argument for a depth of 0.
  FlashReader(std::vector<FileSpec> specs, IoMode io, size_t depth, bool ring);

  // Reads `nbytes` at `offset` of a file into `out`, through staging buffers.
  void read(size_t file, int64_t offset, int64_t nbytes, uint8_t* out);
  // The same without a copy, into new memory; `first` receives the address of the byte at `offset`.
  Buffer read_new(size_t file, int64_t offset, int64_t nbytes, uint8_t** first);
  // Reads record ids[i] (one whole period of units each) to row i of `out`. Neighbours in the list that are
  // neighbours on flash become one read.
  void read_records(size_t file, const int64_t* ids, size_t count, uint8_t* out);

  const FlashFile& file(size_t index) const;
  size_t file_count() const { return files_.size(); }
  bool direct() const { return direct_; }
  // Why kAuto fell back to buffered reads; empty if it didn't.
  const std::string& fallback_reason() const { return fallback_reason_; }
  ReadPool& pool() { return *pool_; }
  // Refuses further reads, waits for those in flight, joins the threads and gives the files back. Idempotent.
  void close();

 private:
  void run(std::vector<WantedPiece> pieces);

  std::vector<std::unique_ptr<FlashFile>> files_;
  bool direct_ = true;
  std::string fallback_reason_;
  OwnProcessPtr<ReadPool> pool_;  // last, so that it stops before the files close
};

}  // namespace ondevice
