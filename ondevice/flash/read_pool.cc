#include "read_pool.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <system_error>

namespace ondevice {
namespace {

// Reads of the ring that are checked and copied together, while others are under way.
constexpr size_t kEnded = 16;

double seconds(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

std::string no_staging(const Piece& piece) {
  return piece.file->spec().path + ": no memory for a staging buffer";
}

// Signals belong to the host program: its own threads receive them.
void block_signals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace

void ReadMeter::begin() {
  if (in_flight_++ == 0) busy_since_ = seconds(CLOCK_MONOTONIC);
}

void ReadMeter::end(uint64_t bytes, double cpu_seconds) {
  stats_.bytes_read += bytes;
  stats_.cpu_seconds += cpu_seconds;
  ++stats_.reads;
  if (--in_flight_ == 0) stats_.read_seconds += seconds(CLOCK_MONOTONIC) - busy_since_;
}

ReadStats ReadMeter::snapshot() const {
  ReadStats stats = stats_;
  if (in_flight_ > 0) stats.read_seconds += seconds(CLOCK_MONOTONIC) - busy_since_;
  return stats;
}

ReadPool::ReadPool(size_t depth, std::unique_ptr<ReadRing> ring)
    : has_ring_(ring != nullptr), ring_(std::move(ring)), process_(getpid()) {
  // Room for the buffers of all reads and of a waiting thread: returning one must not allocate.
  staging_.reserve(depth + kEnded + 1);
  try {
    if (ring_) {
      ring_reads_.resize(depth + kEnded);
      for (size_t i = 0; i < ring_reads_.size(); ++i) idle_ring_reads_.push_back(i);
      threads_.emplace_back([this] { work_ring(); });
      return;
    }
    for (size_t i = 0; i < depth; ++i) threads_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {
    stop();
    throw;
  }
}

void ReadPool::add(PieceSource* source, bool urgent) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    (urgent ? urgent_ : ahead_).push_back(source);
  }
  notify();
}

void ReadPool::remove(PieceSource* source) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (auto* sources : {&urgent_, &ahead_})
    sources->erase(std::remove(sources->begin(), sources->end(), source), sources->end());
  drain(source, lock);
}

void ReadPool::drain(PieceSource* source, std::unique_lock<std::mutex>& lock) {
  drained_.wait(lock, [&] { return source->meter.idle(); });
}

PieceSource* ReadPool::take_any(Piece* piece) {
  for (PieceSource* source : urgent_)
    if (source->take(piece)) return source;
  for (size_t i = 0; i < ahead_.size(); ++i) {
    PieceSource* source = ahead_[(turn_ + i) % ahead_.size()];
    if (!source->take(piece)) continue;
    turn_ = (turn_ + i + 1) % ahead_.size();
    return source;
  }
  return nullptr;
}

void ReadPool::work() {
  block_signals();
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopped_) {
    Piece piece;
    PieceSource* source = take_any(&piece);
    if (!source) {
      work_.wait(lock);
      continue;
    }
    // Each thread that wakes up wakes the next, so that a single new piece doesn't wake them all.
    notify();
    finish(source, piece, lock);
  }
}

void ReadPool::work_ring() {
  block_signals();
  double cpu_before = seconds(CLOCK_THREAD_CPUTIME_ID);
  std::unique_lock<std::mutex> lock(mutex_);
  std::vector<size_t> ended;
  ended.reserve(kEnded);
  for (;;) {
    // New reads are queued before those that have ended are checked and copied, so that the device never
    // idles.
    fill_ring();
    if (in_ring_ == 0 && ended.empty()) {
      if (stopped_) return;
      work_.wait(lock);
      continue;
    }
    lock.unlock();
    ring_->wait(ended.empty() ? 1 : 0);
    for (size_t index : ended) end_ring_read(&ring_reads_[index]);
    const double cpu_now = seconds(CLOCK_THREAD_CPUTIME_ID);
    lock.lock();
    for (size_t index : ended) {
      RingRead& read = ring_reads_[index];
      // The thread's time since the previous reads ended is divided among these in equal parts.
      const double cpu_seconds = (cpu_now - cpu_before) / static_cast<double>(ended.size());
      meter_.end(read.bytes, cpu_seconds);
      read.source->meter.end(read.bytes, cpu_seconds);
      read.source->complete(read.piece, read.error);
      if (read.source->meter.idle()) drained_.notify_all();
      if (read.staging.size() > 0) staging_.push_back(std::move(read.staging));
      read = RingRead();
      idle_ring_reads_.push_back(index);
    }
    if (!ended.empty()) cpu_before = cpu_now;
    ended.clear();
    for (const auto& [index, result] : ring_->ended(kEnded)) {
      ring_reads_[index].result = result;
      ended.push_back(index);
    }
    in_ring_ -= ended.size();
  }
}

void ReadPool::fill_ring() {
  while (!stopped_ && in_ring_ + kEnded < ring_reads_.size()) {
    Piece piece;
    PieceSource* source = take_any(&piece);
    if (!source) return;
    const size_t index = idle_ring_reads_.back();
    RingRead& read = ring_reads_[index];
    const size_t nbytes = static_cast<size_t>(piece.nbytes());
    source->meter.begin();
    meter_.begin();
    try {
      if (!piece.out) read.staging = take_staging(nbytes);
    } catch (const std::bad_alloc&) {
      meter_.end(0, 0);
      source->meter.end(0, 0);
      source->complete(piece, no_staging(piece));
      if (source->meter.idle()) drained_.notify_all();
      continue;
    }
    idle_ring_reads_.pop_back();
    ++in_ring_;
    read.source = source;
    read.piece = piece;
    read.out = piece.out ? piece.out : read.staging.data();
    ring_->read(piece.file->fd(), read.out, static_cast<unsigned>(nbytes), piece.begin(), index);
  }
}

void ReadPool::end_ring_read(RingRead* read) {
  const Piece& piece = read->piece;
  const int64_t begin = piece.begin();
  try {
    if (begin + read->result < piece.range.end)
      read->bytes = static_cast<uint64_t>(piece.file->read(piece.range, read->out, piece.alignment));
    else
      read->bytes = static_cast<uint64_t>(read->result);
    const uint8_t* units = read->out + (piece.range.begin - begin);
    read->source->check(piece, units);
    if (!piece.out) read->source->deliver(piece, units);
  } catch (const FlashError& caught) {
    read->error = caught.what();
  }
}

bool ReadPool::run_one(PieceSource* source, std::unique_lock<std::mutex>& lock) {
  Piece piece;
  if (stopped_ || !source->take(&piece)) return false;
  finish(source, piece, lock);
  return true;
}

void ReadPool::finish(PieceSource* source, const Piece& piece, std::unique_lock<std::mutex>& lock) {
  source->meter.begin();
  meter_.begin();
  lock.unlock();
  double cpu_before = seconds(CLOCK_THREAD_CPUTIME_ID);
  uint64_t bytes = 0;
  std::string error = read(source, piece, &bytes);
  double cpu_seconds = seconds(CLOCK_THREAD_CPUTIME_ID) - cpu_before;
  lock.lock();
  meter_.end(bytes, cpu_seconds);
  source->meter.end(bytes, cpu_seconds);
  source->complete(piece, error);
  if (source->meter.idle()) drained_.notify_all();
}

std::string ReadPool::read(PieceSource* source, const Piece& piece, uint64_t* bytes) {
  MappedBuffer staging;
  std::string error;
  try {
    if (!piece.out) {
      std::lock_guard<std::mutex> lock(mutex_);
      staging = take_staging(static_cast<size_t>(piece.nbytes()));
    }
    uint8_t* out = piece.out ? piece.out : staging.data();
    *bytes = static_cast<uint64_t>(piece.file->read(piece.range, out, piece.alignment));
    const uint8_t* units = out + (piece.range.begin - piece.begin());
    source->check(piece, units);
    if (!piece.out) source->deliver(piece, units);
  } catch (const FlashError& caught) {
    error = caught.what();
  } catch (const std::bad_alloc&) {
    error = no_staging(piece);
  }
  if (staging.size() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    staging_.push_back(std::move(staging));
  }
  return error;
}

MappedBuffer ReadPool::take_staging(size_t nbytes) {
  nbytes = static_cast<size_t>(page_up(static_cast<int64_t>(nbytes)));  // a mapping is whole pages
  MappedBuffer pages;
  if (!staging_.empty()) {
    pages = std::move(staging_.back());
    staging_.pop_back();
  }
  if (pages.size() < nbytes) {
    staging_bytes_ -= pages.size();
    pages = MappedBuffer();
    pages = MappedBuffer(nbytes);
    staging_bytes_ += nbytes;
  }
  return pages;
}

bool ReadPool::inherited() const { return getpid() != process_; }

void ReadPool::stop() {
  std::vector<std::thread> threads;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    for (const auto* sources : {&urgent_, &ahead_})
      for (PieceSource* source : *sources) source->pool_stopped();
    threads.swap(threads_);  // two threads may stop it at once
  }
  work_.notify_all();
  drained_.notify_all();
  for (std::thread& thread : threads) thread.join();
  std::unique_lock<std::mutex> lock(mutex_);
  drained_.wait(lock, [this] { return meter_.idle(); });
  if (!threads.empty()) ring_.reset();
}

void ReadPool::require_running() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stopped_) throw std::invalid_argument("the reader is closed");
}

ReadStats ReadPool::stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  return meter_.snapshot();
}

size_t ReadPool::staging_bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return staging_bytes_;
}

void ReadPool::trim() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const MappedBuffer& buffer : staging_) staging_bytes_ -= buffer.size();
  staging_.clear();
}

}  // namespace ondevice
