"""All programs, and how to compare their results on two backends.

The programs are named, not imported: what they import takes seconds and warns.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAMILIES", "TABLE", "User"]


@dataclass(frozen=True, slots=True)
class User:
    """A program, and how to compare its results on two backends.

    Parameters
    ----------
    name
        Its module in this package, and the function in it.
    worlds
        World sizes to run it at: 2, where results are bitwise the same, and 3, which divides
        nothing evenly; 4 for what needs a plane of ranks.
    tolerance
        Largest difference allowed, relative to the largest element of a tensor.
    exact_at_two
        Whether two ranks give bitwise the same: a sum of two terms has one order only.
    foreign
        Whether the program makes groups of another backend than the default group's.
    reference
        Name of the function that computes, on one process, what a rank returns; for
        what gloo cannot do.
    """

    name: str
    worlds: tuple[int, ...] = (2, 3)
    tolerance: float = 1e-6
    exact_at_two: bool = True
    foreign: bool = False
    reference: str | None = None

    def allowed(self, world_size: int) -> float:
        """The tolerance at a world size."""
        return 0.0 if self.exact_at_two and world_size == 2 else self.tolerance


_HALF = 2e-3  # a step of float16 is 1e-3: gloo adds in it, this library in float32

_USERS = (
    User("data_parallel.several_buckets"),
    User("data_parallel.in_a_sub_group"),
    User("data_parallel.unused_parameters"),
    User("data_parallel.static_graph"),
    User("data_parallel.bucket_views"),
    User("data_parallel.accumulated"),
    User("data_parallel.uneven_inputs"),
    User("data_parallel.uneven_inputs_and_optimizer"),
    User("data_parallel.uneven_inputs_refused"),
    User("data_parallel.buffers"),
    User("data_parallel.sparse_gradients"),
    User("data_parallel.hook_all_reduce"),
    User("data_parallel.hook_float16", tolerance=_HALF),
    User("data_parallel.hook_bfloat16", tolerance=8 * _HALF),
    User("data_parallel.hook_float16_around", tolerance=_HALF),
    # Gloo's processes may be ended by it: its threads let go of the group that owns them.
    User(
        "data_parallel.hook_power_sgd",
        tolerance=1e-5,
        exact_at_two=False,
        reference="data_parallel.power_sgd_alone",
    ),
    User(
        "data_parallel.hook_power_sgd_lossless",
        tolerance=1e-3,
        exact_at_two=False,
        reference="data_parallel.without_communication",
    ),
    User("data_parallel.hook_local_sgd"),
    User("data_parallel.hook_then_optimizer"),
    User("data_parallel.builtin_all_reduce"),
    User("data_parallel.builtin_float16", tolerance=_HALF),
    User("sharded.fsdp_full_shard"),
    User("sharded.fsdp_original_parameters"),
    User("sharded.fsdp_grad_op"),
    User("sharded.fsdp_bfloat16", tolerance=_HALF),
    User("sharded.fsdp_hybrid", worlds=(2, 4)),
    User("sharded.fully_sharded"),
    User("sharded.fully_sharded_kept"),
    User("sharded.fully_sharded_bfloat16", tolerance=_HALF),
    User("sharded.fully_sharded_hybrid", worlds=(2, 4)),
    User(
        "sharded.fully_sharded_accumulated",
        exact_at_two=False,
        reference="sharded.accumulated_alone",
    ),
    User("sharded.zero_redundancy"),
    User("sharded.zero_redundancy_buckets"),
    User("sharded.checkpoint"),
    User("sharded.checkpoint_placed_otherwise", tolerance=0.0),
    User("sharded.checkpoint_in_the_background"),
    User("sharded.sharded_tensor_with_empty_shards", tolerance=0.0),
    User("sharded.state_from_rank_0", tolerance=0.0),
    User("tensor_parallel.redistribute"),
    User("tensor_parallel.redistribute_and_back"),
    User("tensor_parallel.redistribute_on_a_plane", worlds=(2, 4)),
    User("tensor_parallel.operators"),
    User("tensor_parallel.tensor_parallel"),
    User("tensor_parallel.sequence_parallel"),
    User("tensor_parallel.parallel_loss"),
    User("tensor_parallel.sharded_and_tensor_parallel", worlds=(2, 4)),
    User("tensor_parallel.pipeline_gpipe", tolerance=0.0),
    User("tensor_parallel.pipeline_1f1b", tolerance=0.0),
    User("tensor_parallel.pipeline_interleaved", tolerance=0.0),
    User("tensor_parallel.pipeline_zero_bubble", tolerance=0.0),
    User("functional.plain"),
    User("functional.into_given_tensors"),
    User("functional.scattered_into_a_given_tensor"),
    User("functional.with_gradients"),
    User("functional.messages", tolerance=0.0),
    User("functional.of_torch_distributed_nn"),
    User("compiled.fully_sharded"),
    User("compiled.messages"),
    # Compiling takes seconds; on 2 ranks the same is compiled by inductor, below.
    User("compiled.data_parallel", worlds=(3,)),
    User("compiled.functional", worlds=(3,)),
    User("compiled.with_gradients", worlds=(3,)),
    User("compiled.graph_break", worlds=(3,)),
    User("compiled.in_place", worlds=(3,)),
    User("groups.sub_groups"),
    User("groups.sub_groups_of_another_backend", foreign=True),
    User("groups.sub_groups_made_by_members"),
    User("groups.sub_groups_with_options"),
    User("groups.new_subgroups"),
    User("groups.meshes", worlds=(2, 4)),
    User("groups.split"),
    User("groups.again_and_again"),
    User("groups.several_at_once"),
    User("groups.from_threads"),
    User("groups.objects", tolerance=0.0),
    User("groups.messages", tolerance=0.0),
    User("groups.messages_in_a_sub_group"),
    User("groups.collectives"),
    User("groups.collectives_in_flight"),
    User("groups.futures"),
    User("groups.coalesced"),
    User("groups.collected"),
    User("groups.methods"),
    User("groups.monitored_barrier"),
    # Once is enough: it compiles for seconds, and what runs is the same.
    User("compiled.data_parallel_inductor", worlds=(2,)),
    User("compiled.functional_inductor", worlds=(2,)),
    User("compiled.with_gradients_inductor", worlds=(2,)),
    User("compiled.graph_break_inductor", worlds=(2,)),
    User("compiled.in_place_inductor", worlds=(2,)),
)

TABLE = {user.name: user for user in _USERS}
FAMILIES = sorted({name.partition(".")[0] for name in TABLE})
