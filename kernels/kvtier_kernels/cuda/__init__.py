"""CUDA: the driver's functions, kernels compiled on demand, and copies of blocks to and from a
device's pages.

Only a plugin's worker imports this package, and it opens no library until a Driver is created. The
source of a kernel is in kernels/cuda/; tests compile it for devices and, where possible, run it on
the host.
"""

from kvtier_kernels.cuda.blocks import Copier, CopyLane, DevicePieces
from kvtier_kernels.cuda.compiler import compile_kernel, source
from kvtier_kernels.cuda.digests import Digester
from kvtier_kernels.cuda.driver import CudaError, Driver, Event
from kvtier_kernels.cuda.pins import ExtentPins

__all__ = [
    "Copier",
    "CopyLane",
    "CudaError",
    "DevicePieces",
    "Digester",
    "Driver",
    "Event",
    "ExtentPins",
    "compile_kernel",
    "source",
]
