"""Programs that use torch.distributed, run on gloo and on this library's backend."""
