#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ondevice {

// How a text is cut into words before pairs are merged. Its values are those of the table's header.
enum class Splitting : uint32_t {
  kNone = 0,         // the text is one word
  kGpt2 = 1,         // 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
  kGpt2Digits = 2,   // each number by itself, then as kGpt2
  kOneDigit = 3,     // (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*
                     // |\s*[\r\n]+|\s+(?!\S)|\s+
  kThreeDigits = 4,  // likewise, with \p{N}{1,3}
  kCharacters = 5,   // the text is one word, of characters in place of bytes
};
constexpr uint32_t kSplittings = 6;

struct CodePoint {
  uint32_t code;
  size_t bytes;
};
// The first character of `text`, which is valid UTF-8 and not empty: behind an incomplete one the text ends.
CodePoint first_character(std::string_view text);

// Length in bytes of the first part of `text`, beyond which no rule looks. Texts are valid UTF-8 and not
// empty.
size_t first_part(Splitting splitting, std::string_view text);
// Length in bytes of the first word of a part, or of what is left of one.
size_t first_word(Splitting splitting, std::string_view part);

}  // namespace ondevice
