"""What form an answer is to have, as text: no tensors, no HTTP."""
