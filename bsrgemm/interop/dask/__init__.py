"""Block-sparse matrices in panels of block rows, as Dask arrays.

A `PanelArray` is a Dask array whose chunks are `bsr_array`. Panels may lie on disk, and may be on the CPU or the GPU of
the worker that holds them. Importing this package imports Dask; zarr is imported when panels in its format are used.
"""

from .array import PanelArray
from .products import matmul
from .sources import from_bsr, from_delayed, from_panels, to_panels

__all__ = ["PanelArray", "from_bsr", "from_delayed", "from_panels", "matmul", "to_panels"]
