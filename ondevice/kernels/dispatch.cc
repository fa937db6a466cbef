#include "dispatch.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace ondevice {

namespace scalar {
extern const KernelTable kTable;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable kTable;
}
namespace avxvnni {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
namespace amx {
extern const KernelTable kTable;
}
#elif defined(__aarch64__)
namespace neon {
extern const KernelTable kTable;
}
namespace i8mm {
extern const KernelTable kTable;
}
#endif

namespace {

struct Target {
  const char* name;
  const KernelTable* table;
};

#if defined(__x86_64__)
// A register of the processor's extended features (CPUID, leaf 7).
enum class Register { kEax, kEdx };
bool has_feature(unsigned subleaf, Register where, int bit) {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, subleaf, &eax, &ebx, &ecx, &edx)) return false;
  return ((where == Register::kEax ? eax : edx) >> bit & 1) != 0;
}

// Whether the processor has AMX-INT8 and the system lets this process use its tile registers: processors of
// virtual machines may name what the system then refuses.
bool may_use_tile_registers() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return has_feature(0, Register::kEdx, 24) && has_feature(0, Register::kEdx, 25) &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#elif defined(__aarch64__)
bool multiplies_byte_matrices() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0 && (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__APPLE__)
  int present = 0;
  size_t bytes = sizeof(present);
  return sysctlbyname("hw.optional.arm.FEAT_I8MM", &present, &bytes, nullptr, 0) == 0 && present != 0;
#else
  return false;
#endif
}
#endif

std::vector<Target> targets() {
  std::vector<Target> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  // Every AVX2 processor with FMA has F16C as well; the compilers name no test for it.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vnni")) {
    if (may_use_tile_registers()) found.push_back({"amx", &amx::kTable});
    found.push_back({"avx512", &avx512::kTable});
  }
  if (avx2 && has_feature(1, Register::kEax, 4)) found.push_back({"avxvnni", &avxvnni::kTable});
  if (avx2) found.push_back({"avx2", &avx2::kTable});
#elif defined(__aarch64__)
  if (multiplies_byte_matrices()) found.push_back({"i8mm", &i8mm::kTable});
#if defined(__linux__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) found.push_back({"neon", &neon::kTable});
#else
  found.push_back({"neon", &neon::kTable});
#endif
#endif
  found.push_back({"scalar", &scalar::kTable});
  return found;
}

}  // namespace

std::vector<std::string> available_targets() {
  std::vector<std::string> names;
  for (const Target& target : targets()) names.push_back(target.name);
  return names;
}

const KernelTable* find_target(const std::string& name, std::string* resolved) {
  for (const Target& target : targets())
    if (name == "auto" || name == target.name) {
      *resolved = target.name;
      return target.table;
    }
  return nullptr;
}

}  // namespace ondevice
