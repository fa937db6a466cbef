// CRC-32C (Castagnoli, RFC 3720 appendix B.4) of the units that the bytes of a bundle are checked in.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace ondevice {

enum class Crc32cTarget { kAuto, kTable, kHardware };

// True when the processor has a CRC-32C instruction (SSE4.2 or ARMv8 CRC).
bool has_crc32c_instruction();

// CRCs of consecutive units. Unit i of the data has length units[(phase + i) % units.size()]; the last one
// may be short. Writes count_crc_units() values. kHardware must not be asked for without the instruction.
// Equal units are computed three at a time: the instruction has a latency of 3 cycles and a throughput of 1.
void crc32c_units(const uint8_t* data, size_t nbytes, const std::vector<uint64_t>& units, size_t phase,
                  uint32_t* out, Crc32cTarget target = Crc32cTarget::kAuto);

size_t count_crc_units(size_t nbytes, const std::vector<uint64_t>& units, size_t phase);

}  // namespace ondevice
