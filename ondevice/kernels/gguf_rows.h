// Blocks of GGUF's quantised types as rows of tiles that keep every value as it is.
#pragma once

#include <cstdint>
#include <string>

#include "kernel_table.h"

namespace ondevice {

// A type whose scales only tiles hold exactly: a block of `nbytes` bytes has `values` values. `stored` is the
// format of the tiles.
struct TileType {
  const char* name;
  int64_t values, nbytes;
  RowFormat stored;
};

// Null for a type that isn't known here.
const TileType* find_tile_type(const std::string& name);

// `blocks` blocks, one after the other -> codes without gaps, and scales: a float16 for each block of a type
// with one level of them, else headers as RowFormat::header_bytes has them.
void copy_rows(const TileType& type, const uint8_t* data, int64_t blocks, uint8_t* codes, uint8_t* scales);

}  // namespace ondevice
