"""Models split over the ranks: `tensor`, `sequence`, `context`; all axes at once in `mesh`."""

from ringcoll.training.split import conjugate

__all__ = ["conjugate"]
