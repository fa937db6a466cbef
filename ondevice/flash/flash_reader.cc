#include "flash_reader.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace ondevice {
namespace {

// Size of pieces that are read straight into their final place, one system call each; as in ReadAhead.
constexpr int64_t kPieceBytes = int64_t{1} << 20;
// Size of pieces that go through a staging buffer. Every read under way may hold one buffer.
constexpr int64_t kStagedBytes = int64_t{1} << 18;

// A list of pieces that the calling thread and the pool's threads read together.
class Batch : public PieceSource {
 public:
  explicit Batch(std::vector<WantedPiece> pieces) : pieces_(std::move(pieces)) {}

  bool take(Piece* piece) override {
    if (next_ == pieces_.size() || !error_.empty()) return false;
    *piece = pieces_[next_].piece;
    piece->tag = next_++;
    return true;
  }

  void deliver(const Piece& piece, const uint8_t* units) override {
    const WantedPiece& wanted = pieces_[piece.tag];
    std::memcpy(wanted.copy_to, units + (wanted.wanted.begin - piece.range.begin),
                static_cast<size_t>(wanted.wanted.nbytes()));
  }

  void complete(const Piece& piece, const std::string& error) override {
    if (error.empty() || (!error_.empty() && failed_ < piece.tag)) return;
    error_ = error;
    failed_ = piece.tag;
  }

  // Whether every piece was handed out; if one failed, the rest are not.
  bool over() const { return next_ == pieces_.size() || !error_.empty(); }
  // The error of the first piece, in list order, that failed.
  const std::string& error() const { return error_; }

 private:
  std::vector<WantedPiece> pieces_;
  size_t next_ = 0, failed_ = 0;
  std::string error_;
};

}  // namespace

FlashReader::FlashReader(std::vector<FileSpec> specs, IoMode io, size_t depth, bool ring)
    : direct_(io != IoMode::kBuffered) {
  if (depth == 0 || depth > 256)
    throw std::invalid_argument("reads at once must be from 1 to 256, not " + std::to_string(depth));
  try {
    for (const FileSpec& spec : specs) files_.push_back(std::make_unique<FlashFile>(spec, direct_));
  } catch (const DirectRefused& refused) {
    if (io != IoMode::kAuto) throw;
    fallback_reason_ = refused.what();
    direct_ = false;
    files_.clear();
    for (const FileSpec& spec : specs) files_.push_back(std::make_unique<FlashFile>(spec, direct_));
  }
  const bool with_ring = ring && direct_;
  pool_.reset(new ReadPool(depth, with_ring ? ReadRing::make(static_cast<unsigned>(depth)) : nullptr));
}

void FlashReader::close() {
  pool_->stop();
  std::lock_guard<std::mutex> lock(pool_->mutex());  // two threads may close it at once
  for (auto& file : files_) file->close();
}

const FlashFile& FlashReader::file(size_t index) const {
  if (index >= files_.size())
    throw std::out_of_range("file " + std::to_string(index) + " of " + std::to_string(files_.size()));
  return *files_[index];
}

void FlashReader::run(std::vector<WantedPiece> pieces) {
  const bool alone = pieces.size() == 1;
  Batch batch(std::move(pieces));
  pool_->require_running();
  if (!alone) pool_->add(&batch, true);
  {
    std::unique_lock<std::mutex> lock(pool_->mutex());
    while (pool_->run_one(&batch, lock)) {
    }
  }
  pool_->remove(&batch);
  if (!batch.error().empty()) throw FlashError(batch.error());
  if (!batch.over()) throw std::invalid_argument("the reader is closed");
}

void FlashReader::read(size_t file_index, int64_t offset, int64_t nbytes, uint8_t* out) {
  const FlashFile& source = file(file_index);
  std::vector<WantedPiece> pieces;
  const Range all = source.expand(offset, nbytes);
  const bool whole = all.begin == offset && all.end == offset + nbytes;
  for (Range range : source.cut(all, kStagedBytes)) {
    if (whole && !direct_) {  // whole units, from any offset to any address
      pieces.push_back({{&source, range, 1, out + (range.begin - offset)}, {}, nullptr});
      continue;
    }
    const Range wanted = {std::max(range.begin, offset), std::min(range.end, offset + nbytes)};
    pieces.push_back({{&source, range, source.block()}, wanted, out + (wanted.begin - offset)});
  }
  run(std::move(pieces));
}

MappedBuffer FlashReader::read_new(size_t file_index, int64_t offset, int64_t nbytes, uint8_t** first) {
  const FlashFile& source = file(file_index);
  Range all = source.expand(offset, nbytes);
  int64_t base = page_down(all.begin);
  MappedBuffer buffer(static_cast<size_t>(page_up(all.end) - base));
  std::vector<WantedPiece> pieces;
  for (Range range : source.cut(all, kPieceBytes))
    pieces.push_back({{&source, range, kPage, buffer.data() + (page_down(range.begin) - base)}, {}, nullptr});
  run(std::move(pieces));
  *first = buffer.data() + (offset - base);
  return buffer;
}

void FlashReader::read_records(size_t file_index, const int64_t* ids, size_t count, uint8_t* out) {
  const FlashFile& source = file(file_index);
  const int64_t stride = source.period(), start = source.spec().crc_start;
  const int64_t records = (source.spec().nbytes - start) / stride;
  const size_t longest = static_cast<size_t>(std::max<int64_t>(kStagedBytes / stride, 1));
  std::vector<WantedPiece> pieces;
  for (size_t i = 0; i < count;) {
    if (ids[i] < 0 || ids[i] >= records)
      throw std::out_of_range(source.spec().path + ": record " + std::to_string(ids[i]) + " of " +
                              std::to_string(records));
    size_t run_length = 1;
    while (i + run_length < count && run_length < longest &&
           ids[i + run_length] == ids[i] + int64_t(run_length) && ids[i + run_length] < records)
      ++run_length;
    const Range range = {start + ids[i] * stride, start + (ids[i] + int64_t(run_length)) * stride};
    pieces.push_back({{&source, range, source.block()}, range, out + i * static_cast<size_t>(stride)});
    i += run_length;
  }
  if (!pieces.empty()) run(std::move(pieces));
}

}  // namespace ondevice
