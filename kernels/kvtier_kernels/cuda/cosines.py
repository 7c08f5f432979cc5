"""One turn in 1,024 steps: each cosine and sine rounded to float32."""

import numpy as np
import numpy.typing as npt

_EIGHTH = 2 * np.pi * np.arange(129) / 1024
_QUARTER = np.concatenate([np.cos(_EIGHTH), np.sin(_EIGHTH[127::-1])]).astype(np.float32)
_HALF = np.concatenate([_QUARTER, -_QUARTER[255::-1]])
COSINES: npt.NDArray[np.float32] = np.concatenate([_HALF, _HALF[511:0:-1]])
SINES: npt.NDArray[np.float32] = np.roll(COSINES, 256)
