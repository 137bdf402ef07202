import ringcoll.lab.pictures
import ringcoll.tools.testing
import ringcoll.training.data

from .lab.simulation import simulate as simulate
from .runtime.collectives.choosing import Explanation as Explanation
from .runtime.collectives.choosing import explain as explain
from .runtime.collectives.functions import all_gather as all_gather
from .runtime.collectives.functions import all_gather_coalesced as all_gather_coalesced
from .runtime.collectives.functions import all_gather_into_tensor as all_gather_into_tensor
from .runtime.collectives.functions import all_gather_single as all_gather_single
from .runtime.collectives.functions import (
    all_gather_single_coalesced as all_gather_single_coalesced,
)
from .runtime.collectives.functions import all_reduce as all_reduce
from .runtime.collectives.functions import all_reduce_coalesced as all_reduce_coalesced
from .runtime.collectives.functions import all_to_all as all_to_all
from .runtime.collectives.functions import all_to_all_single as all_to_all_single
from .runtime.collectives.functions import barrier as barrier
from .runtime.collectives.functions import broadcast as broadcast
from .runtime.collectives.functions import exscan as exscan
from .runtime.collectives.functions import gather as gather
from .runtime.collectives.functions import monitored_barrier as monitored_barrier
from .runtime.collectives.functions import reduce as reduce
from .runtime.collectives.functions import reduce_scatter as reduce_scatter
from .runtime.collectives.functions import reduce_scatter_single as reduce_scatter_single
from .runtime.collectives.functions import (
    reduce_scatter_single_coalesced as reduce_scatter_single_coalesced,
)
from .runtime.collectives.functions import reduce_scatter_tensor as reduce_scatter_tensor
from .runtime.collectives.functions import scan as scan
from .runtime.collectives.functions import scatter as scatter
from .runtime.collectives.groups import bytes_sent as bytes_sent
from .runtime.collectives.groups import close as close
from .runtime.collectives.groups import share as share
from .runtime.collectives.groups import use as use
from .runtime.group.queue import Work as Work
from .runtime.launch.plain_groups import LocalGroup as LocalGroup
from .runtime.launch.plain_groups import run_threads as run_threads
from .runtime.reduction import UserOp as UserOp
from .runtime.reduction import premul_sum as premul_sum
from .runtime.transport.faulty import Faults as Faults
from .runtime.transport.shared.tensors import empty_shared as empty_shared
from .tools.bench.network import probe as probe
from .tools.tracing import trace as trace
from .training.backend.options import Options as Options

__version__: str
ddp = ringcoll.training.data
pictures = ringcoll.lab.pictures
testing = ringcoll.tools.testing
