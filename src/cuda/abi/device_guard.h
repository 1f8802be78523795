// DeviceGuard: makes a device current for the length of a scope, in any thread. Afterwards the
// thread has the device and context that it had before. The device's primary context is retained
// once per process and pushed; the runtime API follows the current context.
#pragma once
#include "abi/flashvar.h"

namespace flashvar {

class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  // FLASHVAR_OK, or why the device cannot be used (the message is set).
  flashvar_status status() const { return status_; }

 private:
  flashvar_status status_;
};

}  // namespace flashvar
