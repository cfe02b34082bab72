"""From a scheduled step to tensors, through the model, to tokens."""
