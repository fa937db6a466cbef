// What has threads ends in the process that made it only: a child of fork() has none of them to wait for, and
// what they held as it was made stays held.
#pragma once

#include <unistd.h>

#include <memory>

namespace ondevice {

template <class T>
struct EndInOwnProcess {
  void operator()(T* ended) const {
    if (getpid() == process) delete ended;
  }
  pid_t process = getpid();
};

template <class T>
using OwnProcessPtr = std::unique_ptr<T, EndInOwnProcess<T>>;

}  // namespace ondevice
