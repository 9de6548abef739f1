"""What models see with: towers whose features are soft tokens, and a tokenizer of images."""
