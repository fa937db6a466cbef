// The targets that this build contains and this machine can run.
#pragma once

#include <string>
#include <vector>

#include "kernel_table.h"

namespace ondevice {

// Names of the runnable targets, the preferred one first; "scalar" is always last.
std::vector<std::string> available_targets();

// The table of a target, or of the preferred one for "auto". Null if this machine can't run it.
const KernelTable* find_target(const std::string& name, std::string* resolved);

}  // namespace ondevice
