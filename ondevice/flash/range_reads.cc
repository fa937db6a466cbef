#include "range_reads.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace ondevice {
namespace {

constexpr int64_t kPieceBytes = int64_t{1} << 20;  // as in ReadAhead
// Pieces in flight of ranges begun ahead: what is begun meanwhile needn't wait for a full queue.
constexpr size_t kMostAhead = 4;

}  // namespace

RangeReads::RangeReads(std::shared_ptr<FlashReader> reader) : reader_(std::move(reader)) {
  reader_->pool().require_running();
  reader_->pool().add(this, true);
}

uint64_t RangeReads::begin(size_t file_index, int64_t offset, int64_t nbytes, uint64_t target, bool ahead) {
  const FlashFile& file = reader_->file(file_index);
  const Range range = file.expand(offset, nbytes);
  if (range.begin != offset || range.nbytes() != nbytes)
    throw std::invalid_argument(file.spec().path + ": " + std::to_string(nbytes) + " bytes at " +
                                std::to_string(offset) + " aren't whole checked units");
  const auto phase = static_cast<uint64_t>(offset - page_down(offset));
  if (target % kPage != phase)
    throw std::invalid_argument("a target lies in its page as what is read does in its own");
  Wanted wanted{&file, file.cut(range, kPieceBytes), reinterpret_cast<uint8_t*>(target - phase),
                page_down(offset), ahead};
  wanted.pending = wanted.pieces.size();
  uint64_t ticket = 0;
  {
    std::lock_guard<std::mutex> lock(reader_->pool().mutex());
    if (closed_ || reader_->pool().stopped()) throw std::invalid_argument("the reader is closed");
    ticket = ++last_ticket_;
    (ahead ? ahead_ : waiting_).push_back(ticket);
    wanted_.emplace(ticket, std::move(wanted));
  }
  reader_->pool().notify();
  return ticket;
}

bool RangeReads::take(Piece* piece) {
  if (closed_) return false;
  const bool ahead = waiting_.empty();
  if (ahead && (ahead_.empty() || in_flight_ > 0 || ahead_in_flight_ >= kMostAhead)) return false;
  std::deque<uint64_t>& waiting = ahead ? ahead_ : waiting_;
  const uint64_t ticket = waiting.front();
  Wanted& wanted = wanted_.at(ticket);
  piece->file = wanted.file;
  piece->range = wanted.pieces[wanted.next++];
  piece->out = wanted.first_page + (page_down(piece->range.begin) - wanted.base);
  piece->tag = static_cast<size_t>(ticket);
  ++(ahead ? ahead_in_flight_ : in_flight_);
  if (wanted.next == wanted.pieces.size()) waiting.pop_front();
  return true;
}

void RangeReads::complete(const Piece& piece, const std::string& error) {
  Wanted& wanted = wanted_.at(piece.tag);
  if (!error.empty() && wanted.error.empty()) wanted.error = error;
  --(wanted.ahead ? ahead_in_flight_ : in_flight_);
  if (--wanted.pending == 0) arrived_->notify_all();
  if (in_flight_ == 0 && !ahead_.empty()) reader_->pool().notify();
}

void RangeReads::hurry(uint64_t ticket) {
  {
    std::lock_guard<std::mutex> lock(reader_->pool().mutex());
    Wanted& wanted = known(ticket);
    if (!wanted.ahead) return;
    wanted.ahead = false;
    ahead_in_flight_ -= wanted.in_flight();
    in_flight_ += wanted.in_flight();
    const auto found = std::find(ahead_.begin(), ahead_.end(), ticket);
    if (found == ahead_.end()) return;
    ahead_.erase(found);
    waiting_.push_back(ticket);
  }
  reader_->pool().notify();
}

bool RangeReads::drop(uint64_t ticket) {
  std::lock_guard<std::mutex> lock(reader_->pool().mutex());
  const Wanted& wanted = known(ticket);
  if (!wanted.ahead || wanted.next > 0) return false;
  ahead_.erase(std::find(ahead_.begin(), ahead_.end(), ticket));
  wanted_.erase(ticket);
  return true;
}

bool RangeReads::arrived(uint64_t ticket) {
  std::lock_guard<std::mutex> lock(reader_->pool().mutex());
  return known(ticket).pending == 0;
}

void RangeReads::wait(uint64_t ticket) {
  std::unique_lock<std::mutex> lock(reader_->pool().mutex());
  const Wanted& wanted = known(ticket);
  arrived_->wait(lock, [&] { return wanted.pending == 0 || closed_ || reader_->pool().stopped(); });
  if (wanted.pending > 0) throw std::invalid_argument("the reader is closed");
  const std::string error = wanted.error;
  wanted_.erase(ticket);
  if (!error.empty()) throw FlashError(error);
}

void RangeReads::cancel() {
  std::unique_lock<std::mutex> lock(reader_->pool().mutex());
  waiting_.clear();
  ahead_.clear();
  reader_->pool().drain(this, lock);
  wanted_.clear();
}

void RangeReads::close() {
  {
    std::lock_guard<std::mutex> lock(reader_->pool().mutex());
    closed_ = true;
    arrived_->notify_all();
  }
  reader_->pool().remove(this);
}

// The pool's mutex is held.
RangeReads::Wanted& RangeReads::known(uint64_t ticket) {
  const auto found = wanted_.find(ticket);
  if (found == wanted_.end()) throw std::invalid_argument("no range is under way by this ticket");
  return found->second;
}

}  // namespace ondevice
