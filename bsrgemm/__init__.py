"""Block-sparse matrix products for NumPy and CuPy behind the interface of scipy.sparse.bsr_array."""

from ._info import info
from .attention import attention
from .bsr import bsr_array, bsr_matrix, from_dense, get_array_module
from .decode import attention_decode
from .homes import default_device
from .kvcache import KVCache
from .mask import BlockMask
from .matmul import matmul
from .norms import norm
from .plan import ProductPlan, plan
from .sddmm import matmul_backward, sddmm
from .stacking import block_array, block_diag, hstack, kron, vstack
from .tune import tune

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "KVCache",
    "ProductPlan",
    "attention",
    "attention_decode",
    "block_array",
    "block_diag",
    "bsr_array",
    "bsr_matrix",
    "default_device",
    "from_dense",
    "get_array_module",
    "hstack",
    "info",
    "kron",
    "matmul",
    "matmul_backward",
    "norm",
    "plan",
    "sddmm",
    "tune",
    "vstack",
]
