"""The names of contenders and dtypes; pages of help show them without torch."""

NATIVE = "native"
"""Name of torch.distributed's own collective among the contenders."""
AUTO = "auto"
"""Name of whatever algorithm the library chooses by itself."""
PERSISTENT = "persistent"
"""Name of the same, as an operation that is prepared once: by ``plan`` of the public function."""
SHARED = "shared_tensors"
"""Name of `PERSISTENT` on tensors in shared memory: see `ringcoll.empty_shared`."""
OVER = "@"
"""Between the name of a contender and that of another transport than the run's: ``"ring@gloo"``."""
LIMITS = ("exchange", "add", "copy")
"""Names of the limits among the contenders."""
DTYPE_NAMES = (
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "half", "float", "double", "bfloat16",
    "f8e4m3", "f8e5m2", "int16", "uint16", "bool", "complex64", "complex128",
)  # fmt: skip
"""Dtypes by the names of nccl-tests, and more by those of torch."""
OVER_RANKS = ("rank0", "avg", "min", "max")
"""Whose time counts: of rank 0, the mean, the fastest, the slowest; as nccl-tests' -a."""
