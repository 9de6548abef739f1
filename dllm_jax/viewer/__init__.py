"""What people look at: how a model wrote its answers, and what a run did."""
