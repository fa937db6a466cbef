#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tokenizer/splitting.h"

namespace ondevice {

// A tokenizer that merges pairs of bytes or of characters, as tables that are read where they lie
// (weights/README.md, "The table of byte pairs"). The constructor checks all that bounds a read, so the bytes
// must never change after it. All else that a file may have wrong gives other tokens, and no harm. It keeps
// no copy of the bytes, and its methods may run on several threads at once.
class BytePairs {
 public:
  // A matched token of the text, or no token and a stretch of text between such tokens.
  struct Stretch {
    int64_t token;  // -1: none
    std::string_view text;
  };

  // ends: tokens that begin or end a text; they count as special. Throws std::invalid_argument.
  BytePairs(std::string_view file, const std::vector<uint32_t>& ends);

  uint32_t size() const { return num_tokens_; }
  bool composes() const { return composes_; }  // whether text is brought to Unicode's form C
  // Ids of the added tokens with just these flags; `ends` have the flag of special ones.
  std::vector<uint32_t> added_tokens(uint32_t flags) const;

  // Appends the ids of a valid UTF-8 text.
  // special: whether special tokens are matched. composed: whether the text is a stretch of one in form C,
  // behind which only those added tokens are matched that wait for that form. Of characters, none wait.
  void encode(std::string_view text, bool special, bool composed, std::vector<uint32_t>* ids) const;
  // The text cut at those added tokens that are matched before it is brought to form C.
  std::vector<Stretch> cut(std::string_view text, bool special) const;

  // Bytes of a token; empty for one that the file doesn't have.
  std::string_view bytes(uint32_t token) const;
  bool is_added(uint32_t token) const;
  // The added token with this text, or -1.
  int64_t added_token(std::string_view text) const;
  // The token of the merging vocabulary with these bytes, or -1.
  int64_t merged_token(std::string_view bytes) const;

 private:
  struct Words {  // unaligned little-endian uint32
    const uint8_t* data = nullptr;
    uint32_t operator[](size_t index) const {
      uint32_t word;
      std::memcpy(&word, data + 4 * index, 4);
      return word;
    }
  };
  struct Added {
    uint32_t token;
    uint32_t flags;
    std::string_view text;
    bool special() const;
  };
  struct Merge {
    uint32_t token;
    uint32_t rank;
  };

  // Returns the length of all added tokens' texts in bytes.
  uint64_t read_added(Words entries, uint32_t count, const std::vector<uint32_t>& ends);
  void check_merges(uint32_t count) const;
  std::vector<Stretch> matches(std::string_view text, bool special, const std::vector<Added>& added) const;
  const Added* longest_match(std::string_view text, const std::vector<Added>& added) const;
  void encode_plain(std::string_view text, std::vector<uint32_t>* ids) const;
  void read_characters();
  // The token of a character, or 2^32 - 1.
  uint32_t character_token(uint32_t code, std::string_view character) const;
  void merge(std::string_view word, std::vector<uint32_t>* ids) const;
  bool find_merge(uint32_t left, uint32_t right, Merge* result) const;

  Splitting splitting_ = Splitting::kNone;
  uint32_t num_tokens_ = 0, num_merged_ = 0;
  bool composes_ = false, whole_tokens_ = false;
  Words byte_tokens_, starts_, merged_, merge_starts_, merge_rights_, merge_tokens_, merge_ranks_;
  std::string_view text_;
  std::vector<uint32_t> characters_;  // tokens of the first 65,536 characters, if characters are merged
  std::vector<Added> first_, later_;  // matched before and after form C, each in ascending order of texts
};

}  // namespace ondevice
