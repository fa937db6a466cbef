// The reader threads, and the sources that they take pieces from.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../kernels/mapped_buffer.h"
#include "flash_file.h"
#include "read_ring.h"

namespace ondevice {

// One read of whole checked units: one system call, unless it comes short.
struct Piece {
  const FlashFile* file = nullptr;
  Range range;
  // A multiple of the file's block(). `range` is widened to multiples of it when it is read.
  int64_t alignment = kPage;
  // Receives the widened range, and has the same alignment. If null, a staging buffer receives it, and the
  // source's deliver() copies what it wants.
  uint8_t* out = nullptr;
  size_t tag = 0;  // for the source's use

  int64_t begin() const { return align_down(range.begin, alignment); }
  int64_t nbytes() const { return align_up(range.end, alignment) - begin(); }
};

struct ReadStats {
  uint64_t bytes_read = 0;  // requested from the device, in whole pages or blocks
  double read_seconds = 0;  // wall time during which at least one read was in flight
  double cpu_seconds = 0;   // of the threads that read and checked
  uint64_t reads = 0;       // pieces, one system call each unless it comes short
};

// Measures the wall time during which any read is in flight.
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

// Hands pieces to the reader threads. The pool's mutex is held in every call but check() and deliver().
class PieceSource {
 public:
  virtual ~PieceSource() = default;
  // Hands out the next piece. False if there is none at present.
  virtual bool take(Piece* piece) = 0;
  // Compares the bytes from range.begin on with their checksums. Throws FlashError.
  virtual void check(const Piece& piece, const uint8_t* units) { piece.file->check(piece.range, units); }
  // Receives the checked bytes from range.begin on of a staged piece, before they are overwritten.
  virtual void deliver(const Piece&, const uint8_t* /*units*/) {}
  // `error` is empty if the piece arrived and matched its checksums.
  virtual void complete(const Piece& piece, const std::string& error) = 0;
  // The threads are about to end: wakes every thread that waits for this source.
  virtual void pool_stopped() {}

  ReadMeter meter;
};

class ReadPool {
 public:
  // `depth` reads at once: by one thread through `ring`, or by `depth` threads if that is null.
  ReadPool(size_t depth, std::unique_ptr<ReadRing> ring);
  ~ReadPool() { stop(); }
  ReadPool(const ReadPool&) = delete;
  ReadPool& operator=(const ReadPool&) = delete;

  // Urgent sources, whose pieces a thread waits for, go before those that read ahead. Each kind takes turns.
  void add(PieceSource* source, bool urgent);
  // Waits for the source's reads in flight. No thread touches the source after this.
  void remove(PieceSource* source);
  // Waits until none of the source's pieces is in flight. `lock` holds mutex().
  void drain(PieceSource* source, std::unique_lock<std::mutex>& lock);
  // Waits until none is in flight and `over()` is true. `over()` is called each time none is in flight, and
  // when the pool stops.
  template <class Over>
  void wait(PieceSource* source, std::unique_lock<std::mutex>& lock, Over over) {
    drained_.wait(lock, [&] { return source->meter.idle() && (over() || stopped_); });
  }
  // Wakes a reader thread after a source has new pieces. Call with or without mutex() held.
  void notify() { work_.notify_one(); }
  // Wakes the threads that wait for a source. Call with or without mutex() held.
  void wake_waiting() { drained_.notify_all(); }
  // Reads one piece of `source` on the calling thread; false if it has none. `lock` holds mutex(). Worth
  // calling while waiting, unless there is a ring, which needs less CPU time.
  bool run_one(PieceSource* source, std::unique_lock<std::mutex>& lock);
  // Joins the threads and makes stopped() true. Waits for the reads in flight, those of calling threads too:
  // nothing is read afterwards.
  void stop();
  // Whether this process is a child of fork(). It has none of the threads, so it must not wait for them.
  bool inherited() const;

  std::mutex& mutex() { return mutex_; }
  bool stopped() const { return stopped_; }
  // Throws std::invalid_argument once stopped.
  void require_running();
  bool has_ring() const { return has_ring_; }
  ReadStats stats();
  // Bytes of all staging buffers.
  size_t staging_bytes();
  // Frees the staging buffers that aren't in use.
  void trim();

 private:
  // A read that is under way in the ring, or that has ended.
  struct RingRead {
    PieceSource* source = nullptr;
    Piece piece;
    MappedBuffer staging;
    uint8_t* out = nullptr;
    int result = 0;
    std::string error;
    uint64_t bytes = 0;
  };

  void work();
  void work_ring();
  // Queues pieces in the ring while there are any and it has room. The mutex is held.
  void fill_ring();
  // Checks and delivers what the ring has read. Reads that came short or failed are repeated without the
  // ring, so that errors are the same either way.
  void end_ring_read(RingRead* read);
  PieceSource* take_any(Piece* piece);
  void finish(PieceSource* source, const Piece& piece, std::unique_lock<std::mutex>& lock);
  std::string read(PieceSource* source, const Piece& piece, uint64_t* bytes);
  MappedBuffer take_staging(size_t nbytes);  // the mutex is held

  std::mutex mutex_;
  std::condition_variable work_, drained_;
  std::vector<PieceSource*> urgent_, ahead_;
  size_t turn_ = 0;
  bool stopped_ = false;
  ReadMeter meter_;
  std::vector<MappedBuffer> staging_;  // staging buffers not in use
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
