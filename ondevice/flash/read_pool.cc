#include "read_pool.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <system_error>

namespace ondevice {
namespace {

double seconds(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

void ReadMeter::begin() {
  if (in_flight_++ == 0) busy_since_ = seconds(CLOCK_MONOTONIC);
}

void ReadMeter::end(uint64_t bytes, double cpu_seconds) {
  stats_.bytes_read += bytes;
  stats_.cpu_seconds += cpu_seconds;
  if (--in_flight_ == 0) stats_.read_seconds += seconds(CLOCK_MONOTONIC) - busy_since_;
}

ReadStats ReadMeter::snapshot() const {
  ReadStats stats = stats_;
  if (in_flight_ > 0) stats.read_seconds += seconds(CLOCK_MONOTONIC) - busy_since_;
  return stats;
}

ReadPool::ReadPool(size_t threads) {
  try {
    for (size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
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
  // Signals are the host's: they go to its own threads.
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopped_) {
    Piece piece;
    PieceSource* source = take_any(&piece);
    if (!source) {
      work_.wait(lock);
      continue;
    }
    // One waking thread wakes the next, so that a single new piece doesn't wake them all.
    notify();
    finish(source, piece, lock);
  }
}

bool ReadPool::run_one(PieceSource* source, std::unique_lock<std::mutex>& lock) {
  Piece piece;
  if (!source->take(&piece)) return false;
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
  Buffer staging;
  std::string error;
  try {
    if (!piece.pages) staging = take_staging(static_cast<size_t>(piece.page_bytes()));
    uint8_t* pages = piece.pages ? piece.pages : staging.data();
    *bytes = static_cast<uint64_t>(piece.file->read(piece.range, pages));
    const uint8_t* units = pages + (piece.range.begin - page_down(piece.range.begin));
    source->check(piece, units);
    if (!piece.pages) source->deliver(piece, units);
  } catch (const FlashError& caught) {
    error = caught.what();
  } catch (const std::bad_alloc&) {
    error = piece.file->spec().path + ": no memory for a staging buffer";
  }
  if (staging.size() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    staging_.push_back(std::move(staging));
  }
  return error;
}

Buffer ReadPool::take_staging(size_t nbytes) {
  Buffer pages;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!staging_.empty()) {
    pages = std::move(staging_.back());
    staging_.pop_back();
  }
  if (pages.size() < nbytes) {
    staging_bytes_ -= pages.size();
    pages = Buffer();
    pages = Buffer(nbytes);
    staging_bytes_ += nbytes;
  }
  return pages;
}

void ReadPool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    for (PieceSource* source : ahead_) source->pool_stopped();
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
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
  std::vector<Buffer> unused;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Buffer& buffer : staging_) staging_bytes_ -= buffer.size();
  unused.swap(staging_);
}

}  // namespace ondevice
