"""What images become: a tower's features, or codes of a vocabulary."""
