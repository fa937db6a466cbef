// Dense streaming: a schedule of extents read ahead, in order, into a ring of slots.
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

struct StreamStats {
  ReadStats reads;
  double wait_seconds = 0;  // the consumer's, in next()
};

// Slots that somebody else allocated; empty: the stream has its own.
struct SlotMemory {
  std::shared_ptr<uint8_t> data;  // and what keeps it alive
  size_t nbytes = 0;
};

// The reader's threads run ahead of the consumer through the schedule, as far as slots are free. Extents are
// cut into pieces so that the threads share one extent; checksums are compared by the threads. One consumer
// at a time; close() may come from any thread.
class ExtentStream : public PieceSource {
 public:
  // A slot holds the largest extent's whole checked units, to page boundaries. Throws std::invalid_argument
  // for fewer than 2 slots, slots that are too small, memory of another size or not at a page, or an empty
  // schedule; std::out_of_range for an extent outside its file.
  ExtentStream(std::shared_ptr<FlashReader> reader, const std::vector<Extent>& extents, size_t slot_bytes,
               size_t slots, bool cyclic, SlotMemory memory = {});
  ~ExtentStream() override {
    if (!reader_->pool().inherited()) close();
  }

  struct View {
    const uint8_t* data;
    size_t nbytes;
    std::shared_ptr<const uint8_t> owner;
  };

  // The next extent's bytes, valid until its release() or rewind(). Throws FlashError for an extent that
  // failed (which is then behind us and needs no release), std::out_of_range past the end of a schedule that
  // isn't cyclic, std::invalid_argument if all slots but one are held or the stream is closed.
  View next();
  // Gives back the oldest extent held. Throws std::invalid_argument if none is.
  void release();
  // Starts the schedule again; everything held is given back. Free where a cyclic schedule stands at its
  // start.
  void rewind();
  // Goes on with another schedule, from its start, in the same memory. Throws like the constructor, and then
  // leaves everything as it was.
  void reschedule(const std::vector<Extent>& extents);
  // Stops reading ahead and waits for the pieces in flight. Bytes handed out live on while a View does.
  void close();

  // Slot memory.
  size_t nbytes() const { return slot_bytes_ * slots_.size(); }
  StreamStats stats();

  bool take(Piece* piece) override;
  void complete(const Piece& piece, const std::string& error) override;
  void pool_stopped() override;

 private:
  struct Planned {
    const FlashFile* file;
    int64_t offset, nbytes, base;  // base: the page that the slot begins with
    std::vector<Range> pieces;
  };
  struct Slot {
    size_t pending = 0;  // pieces that haven't arrived
    std::string error;
    bool skip = false;  // failed and delivered, waiting for the older ones to be released
  };

  std::vector<Planned> planned(const std::vector<Extent>& extents) const;
  void restart(std::unique_lock<std::mutex>& lock);
  bool open_slot_left() const { return issued_ - released_ < slots_.size(); }
  void advance_past_skipped();
  void require_open() const;

  std::shared_ptr<FlashReader> reader_;
  std::vector<Planned> schedule_;
  const size_t slot_bytes_;
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
