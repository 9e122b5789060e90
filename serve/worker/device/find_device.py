"""Which device serves."""

from __future__ import annotations

from serve.config import DeviceConfig
from serve.errors import ConfigError
from serve.worker.device import cuda_device
from serve.worker.device.cpu_device import CpuDevice
from serve.worker.device.device import Device


def find_device(config: DeviceConfig) -> Device:
    """The device that `--device` names; auto prefers CUDA. Raises ConfigError."""
    has_cuda = cuda_device.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError(
            "--device cuda: this machine has no CUDA device that torch can use. "
            "Use --device cpu, or install a CUDA build of torch and the NVIDIA driver."
        )
    if config.device == "cpu" or not has_cuda:
        return CpuDevice(config.cpu_threads)
    return cuda_device.CudaDevice()
