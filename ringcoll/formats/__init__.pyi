from .chakra import to_chakra as to_chakra
from .goal import to_goal as to_goal
from .msccl import from_msccl as from_msccl
from .msccl import to_msccl as to_msccl
from .mscclpp import from_mscclpp as from_mscclpp
from .mscclpp import to_mscclpp as to_mscclpp
from .reading import schedule_in as schedule_in
