// DeviceGuard through the driver API: retains the primary context of a device, pushes it, pops it.
#include "abi/device_guard.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>

#include "abi/error.h"

namespace flashvar {
namespace {

constexpr int kMaxDevices = 64;  // size of the cache of contexts

// Looks a driver function up at run time, so that the library loads, and can say what is missing,
// on machines without a driver. `since`: the CUDA version, 1000 * major + 10 * minor, that
// introduced it.
template <class Function>
cudaError_t find_driver_function(const char* name, unsigned since, Function*& function) {
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  void* address = nullptr;
  cudaError_t const error =
      cudaGetDriverEntryPointByVersion(name, &address, since, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorInsufficientDriver;
  function = reinterpret_cast<Function*>(address);
  return cudaSuccess;
}

// The driver functions that are needed, or why they are not there.
struct Driver {
  decltype(&cuInit) init = nullptr;
  decltype(&cuDevicePrimaryCtxRetain) retain = nullptr;
  decltype(&cuCtxPushCurrent) push = nullptr;
  decltype(&cuCtxPopCurrent) pop = nullptr;
  cudaError_t error = cudaSuccess;

  Driver() {
    if ((error = find("cuInit", 2000, init)) != cudaSuccess ||
        (error = find("cuDevicePrimaryCtxRetain", 7000, retain)) != cudaSuccess ||
        (error = find("cuCtxPushCurrent", 4000, push)) != cudaSuccess ||
        (error = find("cuCtxPopCurrent", 4000, pop)) != cudaSuccess) {
      cudaGetLastError();  // clears the error: the next caller must not see it
    }
  }

  template <class Function>
  static cudaError_t find(const char* name, unsigned since, Function& function) {
    return find_driver_function(name, since, function);
  }
};

const Driver& driver() {
  static const Driver instance;
  return instance;
}

// The device's primary context, retained at first use and kept until the process ends.
CUresult primary_context(int device, CUcontext* context) {
  static std::atomic<CUcontext> contexts[kMaxDevices];
  *context = contexts[device].load(std::memory_order_acquire);
  if (*context != nullptr) return CUDA_SUCCESS;
  if (CUresult const error = driver().init(0); error != CUDA_SUCCESS) return error;
  CUresult const error = driver().retain(context, device);
  if (error == CUDA_SUCCESS) contexts[device].store(*context, std::memory_order_release);
  return error;
}

flashvar_status enter(int device) {
  if (device < 0 || device >= kMaxDevices) {
    return fail(FLASHVAR_INVALID_ARGUMENT, "device must be 0 to %d, found %d", kMaxDevices - 1,
                device);
  }
  if (cudaError_t const error = driver().error; error != cudaSuccess) {
    return fail(FLASHVAR_CUDA_ERROR, "no usable NVIDIA driver: %s (%d)", cudaGetErrorString(error),
                error);
  }
  CUcontext context = nullptr;
  CUresult error = primary_context(device, &context);
  if (error == CUDA_SUCCESS) error = driver().push(context);
  if (error != CUDA_SUCCESS) {
    return fail(FLASHVAR_CUDA_ERROR, "device %d cannot be used: driver error %d", device, error);
  }
  return FLASHVAR_OK;
}

}  // namespace

DeviceGuard::DeviceGuard(int device) : status_(enter(device)) {}

DeviceGuard::~DeviceGuard() {
  CUcontext popped;
  if (status_ == FLASHVAR_OK) driver().pop(&popped);
}

}  // namespace flashvar
