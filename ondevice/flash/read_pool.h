// The reader threads, and what they take their work from.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../kernels/buffer.h"
#include "flash_file.h"
#include "read_ring.h"

namespace ondevice {

// One read of whole checked units, at most one system call where nothing comes short.
struct Piece {
  const FlashFile* file = nullptr;
  Range range;
  // A multiple of the file's block(): `range` is read widened to multiples of it.
  int64_t alignment = kPage;
  // Receives that, and is aligned likewise. Null: it goes to a staging buffer, and the source's deliver()
  // takes from there what it wants.
  uint8_t* out = nullptr;
  size_t tag = 0;  // the source's own

  int64_t begin() const { return align_down(range.begin, alignment); }
  int64_t nbytes() const { return align_up(range.end, alignment) - begin(); }
};

struct ReadStats {
  uint64_t bytes_read = 0;  // as asked from the device: whole pages or blocks
  double read_seconds = 0;  // wall time during which at least one read was in flight
  double cpu_seconds = 0;   // of the threads that read and checked
  uint64_t reads = 0;       // pieces, one system call each where nothing comes short
};

// Adds up wall time while anything is in flight.
class ReadMeter {
 public:
  void begin();
  void end(uint64_t bytes, double cpu_seconds);
  bool idle() const { return in_flight_ == 0; }
  ReadStats snapshot() const;

 private:
  ReadStats stats_;
  size_t in_flight_ = 0;
  double busy_since_ = 0;
};

// Where threads take pieces from. All but check() and deliver() happens under the pool's mutex.
class PieceSource {
 public:
  virtual ~PieceSource() = default;
  // Hands out the next piece, or returns false if there is none now.
  virtual bool take(Piece* piece) = 0;
  // Compares the bytes from range.begin on with their checksums. Throws FlashError.
  virtual void check(const Piece& piece, const uint8_t* units) { piece.file->check(piece.range, units); }
  // The bytes from range.begin on of a piece that was staged, checked, before they are overwritten.
  virtual void deliver(const Piece&, const uint8_t* /*units*/) {}
  // `error` is empty when the piece arrived and matched its checksums.
  virtual void complete(const Piece& piece, const std::string& error) = 0;
  // The threads are about to end: whoever waits on this source must look.
  virtual void pool_stopped() {}

  ReadMeter meter;
};

class ReadPool {
 public:
  // `depth` reads at once: by one thread through `ring`, or where that is null by as many threads.
  ReadPool(size_t depth, std::unique_ptr<ReadRing> ring);
  ~ReadPool() { stop(); }
  ReadPool(const ReadPool&) = delete;
  ReadPool& operator=(const ReadPool&) = delete;

  // Urgent sources (someone waits) go before the others (reading ahead), which take turns.
  void add(PieceSource* source, bool urgent);
  // No thread touches the source after this; waits for its reads in flight.
  void remove(PieceSource* source);
  // Waits until none of the source's pieces is in flight. `lock` holds mutex().
  void drain(PieceSource* source, std::unique_lock<std::mutex>& lock);
  // Waits until none is and `over()` holds, which is asked whenever none is, and once the pool stops.
  template <class Over>
  void wait(PieceSource* source, std::unique_lock<std::mutex>& lock, Over over) {
    drained_.wait(lock, [&] { return source->meter.idle() && (over() || stopped_); });
  }
  // Lets a thread look for work after a source got some. Call with or without mutex() held.
  void notify() { work_.notify_one(); }
  // Lets whoever waits for a source look again. Call with or without mutex() held.
  void wake_waiting() { drained_.notify_all(); }
  // Reads one piece of `source` on the calling thread; false if it has none. `lock` holds mutex(). Who waits
  // does well to, unless there is a ring, which does it with less work.
  bool run_one(PieceSource* source, std::unique_lock<std::mutex>& lock);
  // Joins the threads; sources find stopped() true. Waits for the reads in flight, the callers' too: nothing
  // is read after it.
  void stop();
  // Whether this is a child of fork(), which has none of the threads: nothing here may be waited for.
  bool inherited() const;

  std::mutex& mutex() { return mutex_; }
  bool stopped() const { return stopped_; }
  // Throws std::invalid_argument once stopped.
  void require_running();
  bool has_ring() const { return has_ring_; }
  ReadStats stats();
  // Bytes of staging buffers held now.
  size_t staging_bytes();
  // Gives the staging buffers back that aren't in use.
  void trim();

 private:
  // A read that the ring has under way, or has ended.
  struct RingRead {
    PieceSource* source = nullptr;
    Piece piece;
    Buffer staging;
    uint8_t* out = nullptr;
    int result = 0;
    std::string error;
    uint64_t bytes = 0;
  };

  void work();
  void work_ring();
  // Hands pieces to the ring as long as there are any and room for them. The mutex is held.
  void fill_ring();
  // Brings to an end what the ring has read: rereads what came short or failed, so that errors are the same.
  void end_ring_read(RingRead* read);
  PieceSource* take_any(Piece* piece);
  void finish(PieceSource* source, const Piece& piece, std::unique_lock<std::mutex>& lock);
  std::string read(PieceSource* source, const Piece& piece, uint64_t* bytes);
  Buffer take_staging(size_t nbytes);  // the mutex is held

  std::mutex mutex_;
  std::condition_variable work_, drained_;
  std::vector<PieceSource*> urgent_, ahead_;
  size_t turn_ = 0;
  bool stopped_ = false;
  ReadMeter meter_;
  std::vector<Buffer> staging_;  // those not in use
  size_t staging_bytes_ = 0;
  const bool has_ring_;
  std::unique_ptr<ReadRing> ring_;
  std::vector<RingRead> ring_reads_;
  std::vector<size_t> idle_ring_reads_;
  size_t in_ring_ = 0;
  std::vector<std::thread> threads_;
  const int process_;
};

}  // namespace ondevice
