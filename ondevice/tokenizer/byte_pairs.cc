#include "tokenizer/byte_pairs.h"

#include <algorithm>
#include <array>
#include <functional>
#include <stdexcept>

namespace ondevice {
namespace {

constexpr std::string_view kMagic("bytepair", 8);
constexpr uint32_t kVersion = 1, kComposes = 1, kWholeTokens = 2, kPutsSpace = 4;  // version and flags
constexpr uint32_t kSpecial = 1, kComposed = 2;                                    // flags of an added token
constexpr size_t kHeaderBytes = 44, kBytes = 256, kMaxTokenBytes = 4096, kMaxAddedBytes = 1 << 19;
constexpr uint32_t kNone = UINT32_MAX, kCharacters = 1 << 16;

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

}  // namespace

BytePairs::BytePairs(std::string_view file, const std::vector<uint32_t>& ends) {
  require(file.size() >= kHeaderBytes && file.substr(0, 8) == kMagic, "it doesn't begin as a table does");
  const Words header{reinterpret_cast<const uint8_t*>(file.data()) + 8};
  require(header[0] == kVersion, "its version isn't 1");
  require(header[1] < kSplittings, "it names a way of splitting that isn't known");
  require(header[2] <= (kComposes | kWholeTokens | kPutsSpace), "it has flags that aren't known");
  splitting_ = static_cast<Splitting>(header[1]);
  composes_ = header[2] & kComposes, whole_tokens_ = header[2] & kWholeTokens;
  num_tokens_ = header[3], num_merged_ = header[4];
  const uint32_t num_merges = header[5], num_added = header[6], num_bytes = header[8];
  const uint64_t tokens = num_tokens_;
  require(num_added <= header[7] && header[7] <= kMaxAddedBytes, "it has too many added tokens");
  uint64_t at = kHeaderBytes;
  const auto section = [&](uint64_t count) {
    const Words words{reinterpret_cast<const uint8_t*>(file.data()) + std::min<uint64_t>(at, file.size())};
    at += 4 * count;
    return words;
  };
  byte_tokens_ = section(kBytes), starts_ = section(tokens + 1), merged_ = section(num_merged_);
  merge_starts_ = section(tokens + 1), merge_rights_ = section(num_merges);
  merge_tokens_ = section(num_merges), merge_ranks_ = section(num_merges);
  const Words added = section(2 * uint64_t{num_added});
  require(at + num_bytes == file.size(), "its size isn't what its header says");
  text_ = file.substr(at);
  require(starts_[0] == 0 && starts_[num_tokens_] == num_bytes, "its tokens don't take all of its text");
  for (uint32_t i = 0; i < num_tokens_; ++i)
    require(starts_[i] <= starts_[i + 1] && starts_[i + 1] - starts_[i] <= kMaxTokenBytes,
            "a token ends before it begins, or has more than 4096 bytes");
  for (size_t i = 0; i < kBytes; ++i)
    require(byte_tokens_[i] < num_tokens_ || byte_tokens_[i] == kNone, "a byte has a token that isn't there");
  for (uint32_t i = 0; i < num_merged_; ++i)
    require(merged_[i] < num_tokens_, "it lists a token that isn't there");
  check_merges(num_merges);
  require(read_added(added, num_added, ends) == header[7],
          "its added tokens' length isn't what its header says");
  if (splitting_ == Splitting::kCharacters) read_characters();
}

void BytePairs::read_characters() {
  characters_.assign(kCharacters, kNone);
  for (uint32_t i = 0; i < num_merged_; ++i) {
    const std::string_view text = bytes(merged_[i]);
    if (text.empty()) continue;
    const CodePoint first = first_character(text);
    if (first.bytes == text.size() && first.code < kCharacters) characters_[first.code] = merged_[i];
  }
}

void BytePairs::check_merges(uint32_t count) const {
  require(merge_starts_[0] == 0 && merge_starts_[num_tokens_] == count,
          "its tokens don't take all of its merges");
  for (uint32_t i = 0; i < num_tokens_; ++i)
    require(merge_starts_[i] <= merge_starts_[i + 1], "a token's merges end before they begin");
  for (uint32_t i = 0; i < count; ++i) {
    require(merge_tokens_[i] < num_tokens_, "a merge makes a token that isn't there");
    require(merge_ranks_[i] < count, "a merge's rank isn't below their number");
  }
}

bool BytePairs::Added::special() const { return (flags & kSpecial) != 0; }

uint64_t BytePairs::read_added(Words entries, uint32_t count, const std::vector<uint32_t>& ends) {
  std::string_view previous;
  uint64_t length = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t token = entries[2 * i], flags = entries[2 * i + 1];
    require(token < num_tokens_, "an added token isn't there");
    require(flags <= (kSpecial | kComposed), "an added token has flags that aren't known");
    const Added added{token, flags, bytes(token)};
    require(previous < added.text, "its added tokens aren't in order, or one has no text");
    previous = added.text;
    length += added.text.size();
    const bool is_end = std::find(ends.begin(), ends.end(), token) != ends.end();
    // An end of text that the file doesn't call special is matched in the text as it stands.
    const bool waits = (flags & kComposed) != 0 && (added.special() || !is_end);
    (waits ? later_ : first_).push_back({token, flags | (is_end ? kSpecial : 0), added.text});
  }
  return length;
}

std::vector<uint32_t> BytePairs::added_tokens(uint32_t flags) const {
  std::vector<uint32_t> ids;
  for (const auto* added : {&first_, &later_})
    for (const Added& it : *added)
      if (it.flags == flags) ids.push_back(it.token);
  return ids;
}

std::string_view BytePairs::bytes(uint32_t token) const {
  if (token >= num_tokens_) return {};
  return text_.substr(starts_[token], starts_[token + 1] - starts_[token]);
}

bool BytePairs::is_added(uint32_t token) const { return added_token(bytes(token)) == token; }

int64_t BytePairs::added_token(std::string_view text) const {
  for (const auto* added : {&first_, &later_}) {
    const auto it = std::lower_bound(added->begin(), added->end(), text,
                                     [](const Added& a, std::string_view t) { return a.text < t; });
    if (it != added->end() && it->text == text) return it->token;
  }
  return -1;
}

int64_t BytePairs::merged_token(std::string_view wanted) const {
  uint32_t low = 0, high = num_merged_;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if (bytes(merged_[middle]) < wanted) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < num_merged_ && bytes(merged_[low]) == wanted ? int64_t{merged_[low]} : -1;
}

const BytePairs::Added* BytePairs::longest_match(std::string_view text,
                                                 const std::vector<Added>& added) const {
  const Added* longest = nullptr;
  auto low = added.begin(), high = added.end();
  // All from `low` to `high` begin with the first `depth` bytes of the text; one of just these comes first.
  for (size_t depth = 0; low != high; ++depth) {
    if (low->text.size() == depth) longest = &*low++;
    if (depth == text.size()) break;
    const auto byte_of = [depth](const Added& it) { return static_cast<uint8_t>(it.text[depth]); };
    const auto byte = static_cast<uint8_t>(text[depth]);
    low = std::lower_bound(low, high, byte, [&](const Added& it, uint8_t b) { return byte_of(it) < b; });
    high = std::upper_bound(low, high, byte, [&](uint8_t b, const Added& it) { return b < byte_of(it); });
  }
  return longest;
}

std::vector<BytePairs::Stretch> BytePairs::matches(std::string_view text, bool special,
                                                   const std::vector<Added>& added) const {
  std::array<bool, kBytes> begins{};
  for (const Added& it : added) begins[static_cast<uint8_t>(it.text[0])] = true;
  std::vector<Stretch> stretches;
  size_t start = 0;
  for (size_t at = 0; at < text.size();) {
    const Added* match =
        begins[static_cast<uint8_t>(text[at])] ? longest_match(text.substr(at), added) : nullptr;
    if (match && (special || !match->special())) {
      if (start < at) stretches.push_back({-1, text.substr(start, at - start)});
      stretches.push_back({match->token, {}});
      start = at + match->text.size();
    }
    // The name of a special token that isn't matched is passed over, with all other names in it.
    at += match ? match->text.size() : 1;
  }
  if (start < text.size()) stretches.push_back({-1, text.substr(start)});
  return stretches;
}

std::vector<BytePairs::Stretch> BytePairs::cut(std::string_view text, bool special) const {
  return matches(text, special, first_);
}

void BytePairs::encode(std::string_view text, bool special, bool composed, std::vector<uint32_t>* ids) const {
  for (const Stretch& stretch : matches(text, special, composed ? later_ : first_)) {
    if (stretch.token >= 0) {
      ids->push_back(static_cast<uint32_t>(stretch.token));
    } else if (!composed && !later_.empty() && splitting_ != Splitting::kCharacters) {
      encode(stretch.text, special, true, ids);
    } else {
      encode_plain(stretch.text, ids);
    }
  }
}

void BytePairs::encode_plain(std::string_view text, std::vector<uint32_t>* ids) const {
  while (!text.empty()) {
    std::string_view part = text.substr(0, first_part(splitting_, text));
    text.remove_prefix(part.size());
    while (!part.empty()) {
      const std::string_view word = part.substr(0, first_word(splitting_, part));
      part.remove_prefix(word.size());
      const int64_t token = whole_tokens_ ? merged_token(word) : -1;
      if (token >= 0) {
        ids->push_back(static_cast<uint32_t>(token));
      } else {
        merge(word, ids);
      }
    }
  }
}

bool BytePairs::find_merge(uint32_t left, uint32_t right, Merge* result) const {
  uint32_t low = merge_starts_[left];
  const uint32_t end = merge_starts_[left + 1];
  for (uint32_t high = end; low < high;) {
    const uint32_t middle = low + (high - low) / 2;
    if (merge_rights_[middle] < right) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == end || merge_rights_[low] != right) return false;
  *result = {merge_tokens_[low], merge_ranks_[low]};
  return true;
}

uint32_t BytePairs::character_token(uint32_t code, std::string_view character) const {
  if (code < kCharacters) return characters_[code];
  const int64_t token = merged_token(character);
  return token < 0 ? kNone : static_cast<uint32_t>(token);
}

// Of all pairs of neighbours the one of the lowest rank becomes one token, of equal ones the first, until
// there is no pair that merges.
void BytePairs::merge(std::string_view word, std::vector<uint32_t>* ids) const {
  struct Symbol {
    uint32_t token, before, after;  // neighbours by index
    Merge merge;                    // with the one after it; rank kNone without one
  };
  std::vector<Symbol> symbols;
  std::vector<uint64_t> heap;  // rank and index of pairs, which may have changed since
  symbols.reserve(word.size()), heap.reserve(word.size());
  const auto look_up = [&](uint32_t i) {
    Symbol& it = symbols[i];
    if (it.after == kNone || !find_merge(it.token, symbols[it.after].token, &it.merge)) {
      it.merge = {0, kNone};
      return false;
    }
    heap.push_back(uint64_t{it.merge.rank} << 32 | i);
    return true;
  };
  const std::greater<uint64_t> later;
  const auto add = [&](uint32_t token) {
    const auto i = static_cast<uint32_t>(symbols.size());
    if (token != kNone) symbols.push_back({token, i - 1, i + 1, {0, kNone}});
  };
  const bool by_characters = splitting_ == Splitting::kCharacters;
  for (size_t at = 0; at < word.size();) {
    const CodePoint first = by_characters ? first_character(word.substr(at)) : CodePoint{0, 1};
    const std::string_view symbol = word.substr(at, first.bytes);
    const uint32_t token = by_characters ? character_token(first.code, symbol) : kNone;
    if (token != kNone) {
      add(token);
    } else {
      for (const char byte : symbol) add(byte_tokens_[static_cast<uint8_t>(byte)]);
    }
    at += first.bytes;
  }
  if (symbols.empty()) return;
  symbols.back().after = kNone;
  for (uint32_t i = 0; i < symbols.size(); ++i) look_up(i);
  std::make_heap(heap.begin(), heap.end(), later);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    const uint64_t first = heap.back();
    heap.pop_back();
    const auto i = static_cast<uint32_t>(first);
    Symbol& left = symbols[i];
    if (left.merge.rank != first >> 32) continue;
    Symbol& right = symbols[left.after];
    left.token = left.merge.token, left.after = right.after;
    right.merge.rank = kNone;
    if (left.after != kNone) symbols[left.after].before = i;
    if (look_up(i)) std::push_heap(heap.begin(), heap.end(), later);
    if (left.before != kNone && look_up(left.before)) std::push_heap(heap.begin(), heap.end(), later);
  }
  for (uint32_t i = 0; i != kNone; i = symbols[i].after) ids->push_back(symbols[i].token);
}

}  // namespace ondevice
