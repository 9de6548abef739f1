"""The language tower: one decoder, its masks, its cache, Hugging Face in and out."""
