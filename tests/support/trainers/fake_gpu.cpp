// Lets torch's CPU build record graphs of fake tensors on `cuda`: nothing else is asked of a device.
#include <c10/core/impl/DeviceGuardImplInterface.h>

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new Guard());
