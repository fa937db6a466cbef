#include "record_batch.h"

#include <cstdint>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace ondevice {
namespace {

// Largest read. Each read under way may hold a staging buffer of this size.
constexpr int64_t kRunBytes = int64_t{1} << 16;

// Whether the device can write the wanted bytes straight to their target.
bool fits(const Piece& piece, const uint8_t* target) {
  const bool whole = piece.begin() == piece.range.begin && piece.nbytes() == piece.range.nbytes();
  return whole && reinterpret_cast<uintptr_t>(target) % static_cast<uintptr_t>(piece.alignment) == 0;
}

}  // namespace

RecordBatch::RecordBatch(std::shared_ptr<FlashReader> reader, bool urgent) : reader_(std::move(reader)) {
  reader_->pool().require_running();
  reader_->pool().add(this, urgent);
}

void RecordBatch::start(size_t file_index, size_t first_part, size_t parts, const int32_t* ids, size_t count,
                        const uint64_t* targets, int64_t gap_bytes) {
  const FlashFile& file = reader_->file(file_index);
  const std::vector<uint64_t>& units = file.spec().units;
  if (parts == 0 || first_part >= units.size() || parts > units.size() - first_part)
    throw std::out_of_range(std::to_string(parts) + " parts from part " + std::to_string(first_part) +
                            " on of " + std::to_string(units.size()));
  const auto first_unit = units.begin() + static_cast<std::ptrdiff_t>(first_part);
  const int64_t part_offset = std::accumulate(units.begin(), first_unit, int64_t{0});
  const int64_t records = (file.spec().nbytes - file.spec().crc_start) / file.period();
  for (size_t i = 0; i < count; ++i)
    if (ids[i] < (i == 0 ? 0 : ids[i - 1] + 1) || ids[i] >= records)
      throw std::out_of_range(file.spec().path + ": record " + std::to_string(ids[i]) +
                              " doesn't follow the one before, or isn't one of " + std::to_string(records));
  {
    std::lock_guard<std::mutex> lock(reader_->pool().mutex());
    if (under_way_) throw std::invalid_argument("finish() the records under way first");
    if (closed_ || reader_->pool().stopped()) throw std::invalid_argument("the reader is closed");
    wanted_.clear();
    runs_.clear();
    wanted_.reserve(count);
    runs_.reserve(count);
    // Nothing below can fail.
    under_way_ = true;
    file_ = &file;
    wanted_bytes_ = std::accumulate(first_unit, first_unit + static_cast<std::ptrdiff_t>(parts), int64_t{0});
    error_.clear();
    next_ = 0;
    for (size_t i = 0; i < count; ++i) {
      const int64_t offset = file.spec().crc_start + ids[i] * file.period() + part_offset;
      const bool joins = !runs_.empty() && offset - (wanted_.back().offset + wanted_bytes_) <= gap_bytes &&
                         offset + wanted_bytes_ - wanted_[runs_.back().first].offset <= kRunBytes;
      if (joins)
        ++runs_.back().count;
      else
        runs_.push_back({i, 1});
      wanted_.push_back({offset, reinterpret_cast<uint8_t*>(targets[i])});
    }
  }
  reader_->pool().notify();
}

bool RecordBatch::take(Piece* piece) {
  if (next_ == runs_.size() || !error_.empty() || closed_) return false;
  const Run& run = runs_[next_];
  piece->file = file_;
  piece->range = {wanted_[run.first].offset, wanted_[run.first + run.count - 1].offset + wanted_bytes_};
  piece->alignment = file_->block();
  if (run.count == 1 && fits(*piece, wanted_[run.first].target)) piece->out = wanted_[run.first].target;
  piece->tag = next_++;
  return true;
}

void RecordBatch::check(const Piece& piece, const uint8_t* units) {
  const Run& run = runs_[piece.tag];
  for (size_t i = run.first; i < run.first + run.count; ++i)
    piece.file->check({wanted_[i].offset, wanted_[i].offset + wanted_bytes_},
                      units + (wanted_[i].offset - piece.range.begin));
}

void RecordBatch::deliver(const Piece& piece, const uint8_t* units) {
  const Run& run = runs_[piece.tag];
  for (size_t i = run.first; i < run.first + run.count; ++i)
    std::memcpy(wanted_[i].target, units + (wanted_[i].offset - piece.range.begin),
                static_cast<size_t>(wanted_bytes_));
}

void RecordBatch::complete(const Piece& piece, const std::string& error) {
  if (error.empty() || (!error_.empty() && failed_ < piece.tag)) return;
  error_ = error;
  failed_ = piece.tag;
}

bool RecordBatch::over() const { return next_ == runs_.size() || !error_.empty() || closed_; }

bool RecordBatch::done() {
  std::lock_guard<std::mutex> lock(reader_->pool().mutex());
  return meter.idle() && (over() || reader_->pool().stopped());
}

size_t RecordBatch::halt() {
  std::lock_guard<std::mutex> lock(reader_->pool().mutex());
  runs_.erase(runs_.begin() + static_cast<std::ptrdiff_t>(next_), runs_.end());
  return runs_.empty() ? 0 : runs_.back().first + runs_.back().count;
}

void RecordBatch::finish() {
  std::unique_lock<std::mutex> lock(reader_->pool().mutex());
  while (!reader_->pool().has_ring() && reader_->pool().run_one(this, lock)) {
  }
  reader_->pool().wait(this, lock, [this] { return over(); });
  under_way_ = false;
  if (!error_.empty()) throw FlashError(error_);
  if (closed_ || next_ < runs_.size()) throw std::invalid_argument("the reader is closed");
}

void RecordBatch::close() {
  {
    std::lock_guard<std::mutex> lock(reader_->pool().mutex());
    closed_ = true;
  }
  reader_->pool().wake_waiting();
  // If two threads close it at once, both wait: each may free the targets afterwards.
  reader_->pool().remove(this);
}

ReadStats RecordBatch::stats() {
  std::lock_guard<std::mutex> lock(reader_->pool().mutex());
  return meter.snapshot();
}

}  // namespace ondevice
