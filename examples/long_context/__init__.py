"""Parts of long_context_train.py: attention, sequences, the loss, and checkpoints."""
