"""How plait-tiny is made: `python -m tools.train_tiny --help`."""
