import numpy as np
import numpy.typing as npt

def acquire() -> None: ...
def copy(
    dst_base: int,
    src_base: int,
    dst: npt.NDArray[np.int64],
    src: npt.NDArray[np.int64],
    nbytes: npt.NDArray[np.int64],
    /,
) -> None: ...
def copy_batches(
    dst_base: int,
    src_base: int,
    dst: npt.NDArray[np.int64],
    src: npt.NDArray[np.int64],
    nbytes: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    landed: npt.NDArray[np.float64],
    halt: npt.NDArray[np.uint8],
    beside: int,
    words_at: npt.NDArray[np.int64] = ...,
    words: npt.NDArray[np.int64] = ...,
    /,
) -> int: ...
def stretch_bytes(nbytes: int, distance: int, /) -> int: ...
