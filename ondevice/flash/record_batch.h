// Records on demand: chosen parts of records are read to given addresses while the caller computes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "flash_reader.h"
#include "read_pool.h"

namespace ondevice {

// One set of records under way at a time. start() and finish() are called by one thread, close() by any.
class RecordBatch : public PieceSource {
 public:
  // urgent: its reads go before those of batches and streams that aren't.
  RecordBatch(std::shared_ptr<FlashReader> reader, bool urgent);
  ~RecordBatch() override {
    if (!reader_->pool().inherited()) close();
  }

  // Begins to read `parts` parts, from `first_part` on, of the records ids[0] < ids[1] < ... of a file, each
  // to its target. A read goes straight to the target if both are aligned to the device's blocks. Records
  // with at most `gap_bytes` between their wanted parts are merged into one read, whose bytes are copied. The
  // targets must stay valid until finish() or close(). Throws std::invalid_argument if the previous batch
  // isn't finished, and std::out_of_range for a part or a record that the file doesn't have.
  void start(size_t file, size_t first_part, size_t parts, const int32_t* ids, size_t count,
             const uint64_t* targets, int64_t gap_bytes);
  // Whether finish() would return without waiting.
  bool done();
  // Cancels the reads that haven't begun, without waiting. Returns the number of leading ids that are still
  // read.
  size_t halt();
  // Helps to read until everything has arrived. Throws the FlashError of the failed record with the lowest
  // id; the targets' contents are then undefined. Even when it throws, no target is written to afterwards.
  void finish();
  // Cancels the reads that haven't begun and waits for the others.
  void close();

  ReadStats stats();

  bool take(Piece* piece) override;
  // Bytes between the wanted parts aren't checked: damage there doesn't matter.
  void check(const Piece& piece, const uint8_t* units) override;
  void deliver(const Piece& piece, const uint8_t* units) override;
  void complete(const Piece& piece, const std::string& error) override;

 private:
  // Whether every read has begun or is cancelled. The pool's mutex is held.
  bool over() const;

  struct Run {
    size_t first, count;  // of wanted_
  };
  struct Wanted {
    int64_t offset;  // of the first part in the file
    uint8_t* target;
  };

  std::shared_ptr<FlashReader> reader_;
  const FlashFile* file_ = nullptr;
  int64_t wanted_bytes_ = 0;  // of each record
  std::vector<Wanted> wanted_;
  std::vector<Run> runs_;
  size_t next_ = 0, failed_ = 0;
  bool under_way_ = false, closed_ = false;
  std::string error_;
};

}  // namespace ondevice
