import ringcoll.pictures
import ringcoll.testing
import ringcoll.training.data

from .backend.c10d import Options as Options
from .bench.network import probe as probe
from .collectives.choosing import Explanation as Explanation
from .collectives.choosing import explain as explain
from .collectives.functions import all_gather as all_gather
from .collectives.functions import all_gather_coalesced as all_gather_coalesced
from .collectives.functions import all_gather_into_tensor as all_gather_into_tensor
from .collectives.functions import all_gather_single as all_gather_single
from .collectives.functions import all_gather_single_coalesced as all_gather_single_coalesced
from .collectives.functions import all_reduce as all_reduce
from .collectives.functions import all_reduce_coalesced as all_reduce_coalesced
from .collectives.functions import all_to_all as all_to_all
from .collectives.functions import all_to_all_single as all_to_all_single
from .collectives.functions import barrier as barrier
from .collectives.functions import broadcast as broadcast
from .collectives.functions import exscan as exscan
from .collectives.functions import gather as gather
from .collectives.functions import monitored_barrier as monitored_barrier
from .collectives.functions import reduce as reduce
from .collectives.functions import reduce_scatter as reduce_scatter
from .collectives.functions import reduce_scatter_single as reduce_scatter_single
from .collectives.functions import (
    reduce_scatter_single_coalesced as reduce_scatter_single_coalesced,
)
from .collectives.functions import reduce_scatter_tensor as reduce_scatter_tensor
from .collectives.functions import scan as scan
from .collectives.functions import scatter as scatter
from .collectives.groups import bytes_sent as bytes_sent
from .collectives.groups import close as close
from .collectives.groups import share as share
from .collectives.groups import use as use
from .group.queue import Work as Work
from .launch.plain_groups import LocalGroup as LocalGroup
from .launch.plain_groups import run_threads as run_threads
from .reduction import UserOp as UserOp
from .reduction import premul_sum as premul_sum
from .simulation import simulate as simulate
from .tracing import trace as trace
from .transport.faulty import Faults as Faults
from .transport.shared.tensors import empty_shared as empty_shared

__version__: str
ddp = ringcoll.training.data
pictures = ringcoll.pictures
testing = ringcoll.testing
