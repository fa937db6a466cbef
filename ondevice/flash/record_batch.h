// Records on demand: the wanted parts of each go to where its reader wants them, while others compute.
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
  // urgent: somebody waits; else its reads go after those of urgent ones.
  RecordBatch(std::shared_ptr<FlashReader> reader, bool urgent);
  ~RecordBatch() override {
    if (!reader_->pool().inherited()) close();
  }

  // Begins to read `parts` parts, from `first_part` on, of the records ids[0] < ids[1] < ... of a file, each
  // to its target: straight there where both lie on blocks of the device. Records with at most `gap_bytes`
  // between what is wanted are one read, which is copied. The targets must stay until finish() or close().
  // Throws std::invalid_argument if the batch before isn't finished, std::out_of_range for a part or a record
  // that the file hasn't.
  void start(size_t file, size_t first_part, size_t parts, const int32_t* ids, size_t count,
             const uint64_t* targets, int64_t gap_bytes);
  // Whether finish() would wait for nothing.
  bool done();
  // Gives up what hasn't begun, without waiting. Returns how many of the ids, from the first on, are read.
  size_t halt();
  // Reads along until everything has arrived. Throws FlashError, of the record with the lowest id that
  // failed: targets then hold anything. Whatever it throws, no target is written to any more.
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
  // Whether no more reads will begin; the pool's mutex is held.
  bool over() const;

  struct Run {
    size_t first, count;  // of wanted_
  };
  struct Wanted {
    int64_t offset;  // of the first part, in the file
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
