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
// several threads. One that is begun `ahead` is read only while no other is under way, a few pieces at a
// time, until hurry() makes it one of the others. close() is called by any thread, the rest by one.
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
  uint64_t begin(size_t file, int64_t offset, int64_t nbytes, uint64_t target, bool ahead = false);
  // A range begun ahead is now waited for. Throws std::invalid_argument for an unknown ticket.
  void hurry(uint64_t ticket);
  // Forgets a range begun ahead, unless some of it has been read or is being read; whether it did. Throws
  // std::invalid_argument for an unknown ticket.
  bool drop(uint64_t ticket);
  // Whether wait() would return at once. Throws std::invalid_argument for an unknown ticket.
  bool arrived(uint64_t ticket);
  // Waits until the range has arrived and matches its checksums, or throws FlashError. A ticket is used once.
  // Throws std::invalid_argument for an unknown ticket, and if all is closed meanwhile: then the memory may
  // be written to until cancel() or close() has returned.
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
    int64_t base;  // offset in the file of the byte at first_page
    bool ahead;
    size_t pending = 0, next = 0;  // pieces that haven't arrived; the first that hasn't begun
    std::string error = {};

    size_t in_flight() const { return pending + next - pieces.size(); }
  };

  Wanted& known(uint64_t ticket);

  std::shared_ptr<FlashReader> reader_;
  std::map<uint64_t, Wanted> wanted_;
  std::deque<uint64_t> waiting_, ahead_;  // tickets of ranges with pieces that haven't begun
  size_t in_flight_ = 0, ahead_in_flight_ = 0;
  uint64_t last_ticket_ = 0;
  bool closed_ = false;
  OwnProcessPtr<std::condition_variable> arrived_{new std::condition_variable};
};

}  // namespace ondevice
