#include "tokenizer/splitting.h"

#include <algorithm>
#include <iterator>

#include "tokenizer/unicode_classes.h"

namespace ondevice {
namespace {

struct Character {
  uint32_t code;
  uint8_t classes;  // kLetter, kNumber, kSpace, kDigit; kNoCharacter behind the end of the text
  size_t end;
};

constexpr uint8_t kNoCharacter = 128;
constexpr uint32_t kLongS = 0x17F;  // whose capital is S
constexpr uint8_t kWordClasses = kLetter | kNumber | kSpace;

uint8_t classes_of(uint32_t code) {
  const ClassRange* after =
      std::upper_bound(std::begin(kClassRanges), std::end(kClassRanges), code,
                       [](uint32_t c, const ClassRange& range) { return c < range.first; });
  return after == std::begin(kClassRanges) ? 0 : std::prev(after)->classes;
}

Character character(std::string_view text, size_t at) {
  if (at >= text.size()) return {0, kNoCharacter, at};
  const CodePoint first = first_character(text.substr(at));
  return {first.code, classes_of(first.code), at + first.bytes};
}

bool is_newline(const Character& c) {
  return c.classes != kNoCharacter && (c.code == '\r' || c.code == '\n');
}
bool is_mark(const Character& c) { return (c.classes & (kWordClasses | kNoCharacter)) == 0; }

template <typename Belongs>
size_t run_end(std::string_view text, size_t at, Belongs belongs) {
  for (Character c = character(text, at); belongs(c); c = character(text, at)) at = c.end;
  return at;
}

size_t class_end(std::string_view text, size_t at, uint8_t wanted) {
  return run_end(text, at, [&](const Character& c) { return (c.classes & wanted) != 0; });
}

size_t marks_end(std::string_view text, size_t at) { return run_end(text, at, is_mark); }

// End of 's, 't, 're, 've, 'm, 'll or 'd at the start of a text that begins with an apostrophe; 0 for none.
size_t contraction_end(std::string_view text, bool any_case) {
  const auto letter = [&](const Character& c) -> uint32_t {
    if (any_case && c.code == kLongS) return 's';
    return any_case && c.code >= 'A' && c.code <= 'Z' ? c.code + 32 : c.code;
  };
  const Character first = character(text, 1), second = character(text, first.end);
  switch (letter(first)) {
    case 's':
    case 't':
    case 'm':
    case 'd':
      return first.end;
    case 'r':
    case 'v':
      return letter(second) == 'e' ? second.end : 0;
    case 'l':
      return letter(second) == 'l' ? second.end : 0;
    default:
      return 0;
  }
}

// \s+(?!\S)|\s+, at white space: all of it, but the last of several characters before something else.
size_t spaces_end(std::string_view text) {
  size_t at = 0, last = 0;
  for (Character c = character(text, 0); c.classes & kSpace; c = character(text, at)) last = at, at = c.end;
  return at == text.size() || last == 0 ? at : last;
}

size_t gpt2_word(std::string_view text) {
  const Character first = character(text, 0);
  if (first.code == '\'')
    if (const size_t end = contraction_end(text, false)) return end;
  const size_t start = first.code == ' ' ? first.end : 0;
  const Character next = start ? character(text, start) : first;
  for (const uint8_t wanted : {kLetter, kNumber})
    if (next.classes & wanted) return class_end(text, start, wanted);
  return is_mark(next) ? marks_end(text, start) : spaces_end(text);
}

size_t cased_word(std::string_view text, int most_digits) {
  const Character first = character(text, 0);
  if (first.code == '\'')
    if (const size_t end = contraction_end(text, true)) return end;
  const bool joins = !(first.classes & (kLetter | kNumber)) && !is_newline(first);
  const size_t letters = joins ? first.end : 0;
  if (const size_t end = class_end(text, letters, kLetter); end > letters) return end;
  if (first.classes & kNumber) {
    size_t end = first.end;
    Character c = character(text, end);
    for (int i = 1; i < most_digits && (c.classes & kNumber); ++i) end = c.end, c = character(text, end);
    return end;
  }
  const size_t start = first.code == ' ' ? first.end : 0;
  if (const size_t end = marks_end(text, start); end > start) return run_end(text, end, is_newline);
  size_t newlines = 0;
  for (Character c = character(text, 0); c.classes & kSpace; c = character(text, c.end))
    if (is_newline(c)) newlines = c.end;
  return newlines ? newlines : spaces_end(text);
}

}  // namespace

CodePoint first_character(std::string_view text) {
  const auto byte = [&](size_t i) -> uint32_t { return i < text.size() ? static_cast<uint8_t>(text[i]) : 0; };
  const uint32_t first = byte(0);
  if (first < 0xC0) return {first, 1};
  if (first < 0xE0) return {(first & 31) << 6 | (byte(1) & 63), std::min<size_t>(2, text.size())};
  uint32_t code = (first & 15) << 12 | (byte(1) & 63) << 6 | (byte(2) & 63);
  if (first < 0xF0) return {code, std::min<size_t>(3, text.size())};
  code = (first & 7) << 18 | (byte(1) & 63) << 12 | (byte(2) & 63) << 6 | (byte(3) & 63);
  return {code, std::min<size_t>(4, text.size())};
}

size_t first_part(Splitting splitting, std::string_view text) {
  if (splitting != Splitting::kGpt2Digits) return text.size();
  const size_t end =
      run_end(text, 0, [](const Character& c) { return c.classes != kNoCharacter && !(c.classes & kDigit); });
  return end ? end : character(text, 0).end;
}

size_t first_word(Splitting splitting, std::string_view part) {
  switch (splitting) {
    case Splitting::kGpt2:
    case Splitting::kGpt2Digits:
      return gpt2_word(part);
    case Splitting::kOneDigit:
      return cased_word(part, 1);
    case Splitting::kThreeDigits:
      return cased_word(part, 3);
    case Splitting::kNone:
    case Splitting::kCharacters:
      break;
  }
  return part.size();
}

}  // namespace ondevice
