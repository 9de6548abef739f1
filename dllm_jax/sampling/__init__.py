"""Block-diffusion sampling with a key/value cache and a trace."""
