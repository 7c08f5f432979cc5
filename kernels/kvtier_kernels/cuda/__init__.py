"""CUDA: the driver's functions, kernels compiled when they are needed, blocks to and from a device's pages.

Only a plugin's worker imports this, and nothing is opened before it makes a Driver. A kernel is a text in
kernels/cuda/, which the tests compile for devices and, where they can, run on the host.
"""

from kvtier_kernels.cuda.blocks import Copier, DevicePieces, Lane
from kvtier_kernels.cuda.compiler import compile_kernel, source
from kvtier_kernels.cuda.driver import CudaError, Driver, Event
from kvtier_kernels.cuda.pins import Pins

__all__ = [
    "Copier",
    "CudaError",
    "DevicePieces",
    "Driver",
    "Event",
    "Lane",
    "Pins",
    "compile_kernel",
    "source",
]
