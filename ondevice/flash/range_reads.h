// Ranges on demand, each read straight to a given address while the caller computes: experts, for example.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../kernels/own_process.h"
#include "flash_reader.h"
#include "read_pool.h"

namespace ondevice {

// Any number of ranges under way, which are read in the order in which they were begun, each in pieces by
// several threads. begin(), wait() and cancel() are called by one thread, close() by any.
class RangeReads : public PieceSource {
 public:
  explicit RangeReads(std::shared_ptr<FlashReader> reader);
  ~RangeReads() override {
    if (!reader_->pool().inherited()) close();
  }

  // Begins to read `nbytes` bytes at `offset` of a file, whole checked units, to `target`, and returns a
  // ticket. `target` lies in its page as `offset` does in its own. From the begin of that page to the end of
  // the last one's, the memory is written to until wait(), cancel() or close() has returned. Throws
  // std::out_of_range and std::invalid_argument for impossible arguments.
  uint64_t begin(size_t file, int64_t offset, int64_t nbytes, uint64_t target);
  // Waits until the range has arrived and matches its checksums, or throws FlashError. A ticket is used once.
  void wait(uint64_t ticket);
  // Begins no more reads, waits for those in flight and forgets all tickets.
  void cancel();
  void close();

  bool take(Piece* piece) override;
  void complete(const Piece& piece, const std::string& error) override;
  void pool_stopped() override { arrived_->notify_all(); }

 private:
  struct Wanted {
    const FlashFile* file;
    std::vector<Range> pieces;
    uint8_t* first_page;
    int64_t base;                  // offset in the file of the byte at first_page
    size_t pending = 0, next = 0;  // pieces that haven't arrived; the first that hasn't begun
    std::string error = {};
  };

  std::shared_ptr<FlashReader> reader_;
  std::map<uint64_t, Wanted> wanted_;
  std::deque<uint64_t> waiting_;  // tickets of ranges with pieces that haven't begun
  uint64_t last_ticket_ = 0;
  bool closed_ = false;
  OwnProcessPtr<std::condition_variable> arrived_{new std::condition_variable};
};

}  // namespace ondevice
