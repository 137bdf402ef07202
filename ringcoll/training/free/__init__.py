"""Out of lock-step: `gossip`, `local_sgd`, a parameter `server`; `straggler` makes ranks slow."""
