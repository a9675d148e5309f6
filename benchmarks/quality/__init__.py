"""What a small model loses if it trains on long sequences with sparse attention."""
