#include "dispatch.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace ondevice {

namespace scalar {
extern const KernelTable kTable;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
#elif defined(__aarch64__)
namespace neon {
extern const KernelTable kTable;
}
#endif

namespace {

struct Target {
  const char* name;
  const KernelTable* table;
};

std::vector<Target> targets() {
  std::vector<Target> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vnni"))
    found.push_back({"avx512", &avx512::kTable});
  // Every AVX2 processor with FMA has F16C as well; the compilers name no test for it.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    found.push_back({"avx2", &avx2::kTable});
#elif defined(__aarch64__)
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
