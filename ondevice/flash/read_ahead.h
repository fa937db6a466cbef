// Offloaded dense weights: a schedule of extents, read ahead in order into a ring of slots.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../kernels/own_process.h"
#include "flash_reader.h"
#include "read_pool.h"

namespace ondevice {

struct Extent {
  size_t file = 0;
  int64_t offset = 0, nbytes = 0;
};

struct ReadAheadStats {
  ReadStats reads;
  double wait_seconds = 0;  // spent waiting in next()
};

// Memory for slots that the caller allocated. If empty, the read-ahead allocates its own.
struct SlotMemory {
  std::shared_ptr<uint8_t> data;  // keeps the memory alive
  size_t nbytes = 0;
};

// The reader's threads run ahead of the consumer through the schedule, as far as slots are free. Extents are
// cut into pieces, so that several threads read one extent. The threads also compare the checksums. One
// consumer at a time; close() may be called from any thread.
class ReadAhead : public PieceSource {
 public:
  // Memory for `slots` slots of `slot_bytes`. Unless it is lent, it has more slots where a schedule's extents
  // are smaller; a lender may use what an extent leaves of its slot. A slot must hold the largest extent,
  // widened to whole checked units and to page boundaries. Throws std::invalid_argument for fewer than 2
  // slots, slots that are too small, memory of another size or not page-aligned, or an empty schedule, and
  // std::out_of_range for an extent outside its file.
  ReadAhead(std::shared_ptr<FlashReader> reader, const std::vector<Extent>& extents, size_t slot_bytes,
            size_t slots, bool cyclic, SlotMemory memory = {});
  ~ReadAhead() override {
    if (!reader_->pool().inherited()) close();
  }

  struct View {
    const uint8_t* data;
    size_t nbytes;
    std::shared_ptr<const uint8_t> owner;
  };

  // The next extent's bytes, valid until its release() or rewind(). Throws FlashError for an extent that
  // failed, which is then skipped and needs no release, std::out_of_range past the end of a schedule that
  // isn't cyclic, and std::invalid_argument if all slots but one are held or it is closed.
  View next();
  // Releases the oldest extent held. Throws std::invalid_argument if none is held.
  void release();
  // Restarts the schedule and releases every extent held. Costs nothing where a cyclic schedule is at its
  // start.
  void rewind();
  // Replaces the schedule, in the same memory, and starts with the new one's first extent. Throws what the
  // constructor throws, and then changes nothing.
  void reschedule(const std::vector<Extent>& extents);
  // Stops reading ahead and waits for the pieces in flight. A View keeps its bytes alive after that.
  void close();

  // Slot memory.
  size_t nbytes() const { return nbytes_; }
  ReadAheadStats stats();

  bool take(Piece* piece) override;
  void complete(const Piece& piece, const std::string& error) override;
  void pool_stopped() override;

 private:
  struct Planned {
    const FlashFile* file;
    int64_t offset, nbytes, base;  // base: file offset of the slot's first page
    std::vector<Range> pieces;
  };
  struct Schedule {
    std::vector<Planned> extents;
    size_t slot_bytes = 0;  // what the largest extent needs, or a lender gave
  };
  struct Slot {
    size_t pending = 0;  // pieces that haven't arrived
    std::string error;
    bool skip = false;  // failed, and next() has said so; released once all older extents are
  };

  Schedule planned(const std::vector<Extent>& extents) const;
  void begin(Schedule schedule);
  void restart(std::unique_lock<std::mutex>& lock);
  bool open_slot_left() const { return issued_ - released_ < slots_.size(); }
  void advance_past_skipped();
  void require_open() const;

  std::shared_ptr<FlashReader> reader_;
  Schedule schedule_;
  const size_t max_slot_bytes_, nbytes_;
  const bool is_lent_;
  const bool cyclic_;
  std::shared_ptr<uint8_t> memory_;
  std::vector<Slot> slots_;
  OwnProcessPtr<std::condition_variable> arrived_{new std::condition_variable};
  // Extents counted since the last rewind: released_ <= taken_ <= issued_ <= released_ + slots.
  uint64_t issued_ = 0, taken_ = 0, released_ = 0;
  size_t issued_pieces_ = 0;  // of extent number issued_
  size_t held_ = 0;
  bool paused_ = false, closed_ = false;
  double wait_seconds_ = 0;
};

}  // namespace ondevice
