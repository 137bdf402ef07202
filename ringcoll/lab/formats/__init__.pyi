from .msccl import from_msccl as from_msccl
from .msccl import to_msccl as to_msccl
from .mscclpp import from_mscclpp as from_mscclpp
from .mscclpp import schedule_in as schedule_in
from .mscclpp import to_mscclpp as to_mscclpp
from .mscclpp import topology_in as topology_in
from .network_files import topology_from_nccl as topology_from_nccl
