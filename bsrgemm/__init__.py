"""Block-sparse matrix products and masked attention for NumPy and CuPy.

The class `bsr_array` has the interface of `scipy.sparse.bsr_array`, on the CPU and on the GPU.
"""

from . import linalg
from ._array.assemble import block_array, block_diag, hstack, kron, vstack
from ._array.create import diags, eye, random
from ._array.files import load_npz, save_npz
from ._array.reduce import norm
from ._attention.attention import attention
from ._attention.decode import attention_decode
from ._attention.gradients import attention_backward
from ._attention.kv_cache import KVCache
from ._attention.mask import BlockMask
from ._attention.merge import merge_states, merge_states_backward
from ._backend.registry import default_device
from ._batch import bsr_batch
from ._environment import info
from ._kernels.overlapping import overlapping
from ._products.gradients import matmul_backward, sddmm_backward
from ._products.matmul import matmul
from ._products.sddmm import sddmm
from ._products.spgemm import ProductPlan, plan
from ._products.tune import tune
from ._pullbacks import vjp
from ._version import __version__
from .bsr import bsr_array, bsr_matrix, from_dense, get_array_module

__all__ = [
    "BlockMask",
    "KVCache",
    "ProductPlan",
    "__version__",
    "attention",
    "attention_backward",
    "attention_decode",
    "block_array",
    "block_diag",
    "bsr_array",
    "bsr_batch",
    "bsr_matrix",
    "default_device",
    "diags",
    "eye",
    "from_dense",
    "get_array_module",
    "hstack",
    "info",
    "kron",
    "linalg",
    "load_npz",
    "matmul",
    "matmul_backward",
    "merge_states",
    "merge_states_backward",
    "norm",
    "overlapping",
    "plan",
    "random",
    "save_npz",
    "sddmm",
    "sddmm_backward",
    "tune",
    "vjp",
    "vstack",
]
