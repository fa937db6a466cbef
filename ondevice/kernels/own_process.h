// A pointer to an object with threads, which is destroyed only in the process that created it. A child of
// fork() has none of the threads, so it can't wait for them, and locks that they held at the fork stay
// locked.
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
