// Reads on demand: ranges and records of a set of files, read in parallel and checked before the call
// returns.
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

// A piece, and which part of it is copied where if it was staged.
struct WantedPiece {
  Piece piece;
  Range wanted;  // inside the piece's range
  uint8_t* copy_to;
};

enum class IoMode { kAuto, kDirect, kBuffered };

class FlashReader {
 public:
  // Opens every file, for `depth` reads at once. `depth` threads read; or with `ring`, one thread through
  // io_uring, where reads are direct and the system supports it. kAuto falls back to buffered reads of all
  // files if one of them refuses direct reads. Throws what FlashFile throws, and std::invalid_argument for a
  // depth of 0.
  FlashReader(std::vector<FileSpec> specs, IoMode io, size_t depth, bool ring);

  // Reads `nbytes` at `offset` of a file into `out`, by way of staging buffers.
  void read(size_t file, int64_t offset, int64_t nbytes, uint8_t* out);
  // The same without a copy, into new memory; `first` receives the address of the byte at `offset`.
  MappedBuffer read_new(size_t file, int64_t offset, int64_t nbytes, uint8_t** first);
  // Reads record ids[i] (one whole period of units each) to row i of `out`. Records that are neighbours
  // both in the list and on flash become one read.
  void read_records(size_t file, const int64_t* ids, size_t count, uint8_t* out);

  const FlashFile& file(size_t index) const;
  size_t file_count() const { return files_.size(); }
  bool direct() const { return direct_; }
  // Why kAuto fell back to buffered reads; empty if it didn't.
  const std::string& fallback_reason() const { return fallback_reason_; }
  ReadPool& pool() { return *pool_; }
  // Refuses further reads, waits for those in flight, joins the threads and closes the files. Idempotent.
  void close();

 private:
  void run(std::vector<WantedPiece> pieces);

  std::vector<std::unique_ptr<FlashFile>> files_;
  bool direct_ = true;
  std::string fallback_reason_;
  OwnProcessPtr<ReadPool> pool_;  // last, so that it stops before the files are closed
};

}  // namespace ondevice
