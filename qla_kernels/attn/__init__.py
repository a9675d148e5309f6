"""Code that all attention families share: the row statistics of their backwards."""
