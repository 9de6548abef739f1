"""The ops for TPU: `pl.pallas_call`, Mosaic."""
