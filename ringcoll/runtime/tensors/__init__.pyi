from .memory import can_write as can_write
from .memory import extent as extent
from .memory import has_memory as has_memory
from .memory import is_dense as is_dense
from .memory import is_plain as is_plain
from .memory import with_memory as with_memory
from .overlap import check_apart as check_apart
from .overlap import share_blocks as share_blocks
