"""A real GPU. Without one, a message says so and the tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier_kernels.cuda import CudaError
from support.real_gpu import RealGpu


@pytest.fixture
def gpu() -> Iterator[RealGpu]:
    try:
        real = RealGpu()
    except CudaError as error:
        pytest.skip(f"{error}: NOTHING IS RUN ON A GPU HERE")
    yield real
    real.forget()
