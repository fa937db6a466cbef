// Records on demand: one part of each goes straight to where its reader wants it, while others compute.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "flash_reader.h"
#include "read_pool.h"

namespace ondevice {

// One set of records under way at a time; start() and finish() belong to one thread, close() to any.
class RecordBatch : public PieceSource {
 public:
  explicit RecordBatch(std::shared_ptr<FlashReader> reader);
  ~RecordBatch() override { close(); }

  // Begins to read part `part` of the records ids[0] < ids[1] < ... of a file, each to its target. Records
  // with at most `gap_bytes` between the parts wanted are one read. The targets must stay until finish() or
  // close(). Throws std::invalid_argument if the batch before isn't finished, std::out_of_range for a part or
  // a record that the file hasn't.
  void start(size_t file, size_t part, const int32_t* ids, size_t count, const uint64_t* targets,
             int64_t gap_bytes);
  // Reads along until everything has arrived. Throws FlashError, of the record with the lowest id that
  // failed; whatever it throws, no target is written to any more.
  void finish();
  // Gives up what hasn't begun and waits for what has.
  void close();

  ReadStats stats();

  bool take(Piece* piece) override;
  // What lies between the parts wanted may be damaged: nobody asked for it.
  void check(const Piece& piece, const uint8_t* units) override;
  void deliver(const Piece& piece, const uint8_t* units) override;
  void complete(const Piece& piece, const std::string& error) override;

 private:
  struct Run {
    size_t first, count;  // of wanted_
  };
  struct Wanted {
    int64_t offset;  // of the part, in the file
    uint8_t* target;
  };

  std::shared_ptr<FlashReader> reader_;
  const FlashFile* file_ = nullptr;
  int64_t part_bytes_ = 0;
  std::vector<Wanted> wanted_;
  std::vector<Run> runs_;
  size_t next_ = 0, failed_ = 0;
  bool under_way_ = false, closed_ = false;
  std::string error_;
};

}  // namespace ondevice
