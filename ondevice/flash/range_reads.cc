#include "range_reads.h"

#include <stdexcept>
#include <utility>

namespace ondevice {
namespace {

constexpr int64_t kPieceBytes = int64_t{1} << 20;  // as in ReadAhead

}  // namespace

RangeReads::RangeReads(std::shared_ptr<FlashReader> reader) : reader_(std::move(reader)) {
  reader_->pool().require_running();
  reader_->pool().add(this, true);
}

uint64_t RangeReads::begin(size_t file_index, int64_t offset, int64_t nbytes, uint64_t target) {
  const FlashFile& file = reader_->file(file_index);
  const Range range = file.expand(offset, nbytes);
  if (range.begin != offset || range.nbytes() != nbytes)
    throw std::invalid_argument(file.spec().path + ": " + std::to_string(nbytes) + " bytes at " +
                                std::to_string(offset) + " aren't whole checked units");
  const auto phase = static_cast<uint64_t>(offset - page_down(offset));
  if (target % kPage != phase)
    throw std::invalid_argument("a target lies in its page as what is read does in its own");
  Wanted wanted{&file, file.cut(range, kPieceBytes), reinterpret_cast<uint8_t*>(target - phase),
                page_down(offset)};
  wanted.pending = wanted.pieces.size();
  uint64_t ticket = 0;
  {
    std::lock_guard<std::mutex> lock(reader_->pool().mutex());
    if (closed_ || reader_->pool().stopped()) throw std::invalid_argument("the reader is closed");
    ticket = ++last_ticket_;
    waiting_.push_back(ticket);
    wanted_.emplace(ticket, std::move(wanted));
  }
  reader_->pool().notify();
  return ticket;
}

bool RangeReads::take(Piece* piece) {
  if (waiting_.empty() || closed_) return false;
  const uint64_t ticket = waiting_.front();
  Wanted& wanted = wanted_.at(ticket);
  piece->file = wanted.file;
  piece->range = wanted.pieces[wanted.next++];
  piece->out = wanted.first_page + (page_down(piece->range.begin) - wanted.base);
  piece->tag = static_cast<size_t>(ticket);
  if (wanted.next == wanted.pieces.size()) waiting_.pop_front();
  return true;
}

void RangeReads::complete(const Piece& piece, const std::string& error) {
  Wanted& wanted = wanted_.at(piece.tag);
  if (!error.empty() && wanted.error.empty()) wanted.error = error;
  if (--wanted.pending == 0) arrived_->notify_all();
}

void RangeReads::wait(uint64_t ticket) {
  std::unique_lock<std::mutex> lock(reader_->pool().mutex());
  const auto found = wanted_.find(ticket);
  if (found == wanted_.end()) throw std::invalid_argument("no range is under way by this ticket");
  arrived_->wait(lock, [&] { return found->second.pending == 0 || closed_ || reader_->pool().stopped(); });
  if (found->second.pending > 0) throw std::invalid_argument("the reader is closed");
  const std::string error = found->second.error;
  wanted_.erase(found);
  if (!error.empty()) throw FlashError(error);
}

void RangeReads::cancel() {
  std::unique_lock<std::mutex> lock(reader_->pool().mutex());
  waiting_.clear();
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

}  // namespace ondevice
