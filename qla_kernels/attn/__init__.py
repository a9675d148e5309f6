"""What the attention families share: their backward's statistics of a row."""
