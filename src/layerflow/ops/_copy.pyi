import numpy as np
import numpy.typing as npt

def copy(
    dst_base: int,
    src_base: int,
    dst: npt.NDArray[np.int64],
    src: npt.NDArray[np.int64],
    nbytes: npt.NDArray[np.int64],
    /,
) -> None: ...
