"""Layers of models in training, with our functions in them and without."""
