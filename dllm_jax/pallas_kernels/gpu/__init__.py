"""The ops for GPU: `plgpu.kernel`, Mosaic GPU, for Hopper (H100, H200)."""
